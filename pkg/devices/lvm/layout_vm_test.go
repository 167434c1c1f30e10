//go:build vm

package lvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// newWideGroup makes a volume group of disks that hold what an earlier tenant has left.
func newWideGroup(t *testing.T, name string, bytes ...int64) (disks []string) {
	t.Helper()
	for _, size := range bytes {
		disk := newPV(t, size)
		fill(t, disk, size)
		disks = append(disks, disk)
	}
	lvmOn(t, disks, append([]string{"vgcreate", "--yes", name}, disks...)...)
	t.Cleanup(func() { removeGroup(t, name, disks...) })
	return disks
}

// legsOf returns the disks of each leg of a volume.
func legsOf(t *testing.T, disks []string, group, volume string) (legs [][]string) {
	t.Helper()
	var raw struct {
		Report []struct{ Seg []map[string]string }
	}
	out := lvmOn(t, disks, "lvs", "--all", "--segments", "--reportformat", "json", "--options", "lv_name,seg_pe_ranges", group)
	require.NoError(t, json.Unmarshal([]byte(out), &raw))
	by := map[string]int{}
	add := func(leg, extents string) {
		i, has := by[leg]
		if !has {
			i, by[leg] = len(legs), len(legs)
			legs = append(legs, nil)
		}
		if disk, _, _ := strings.Cut(extents, ":"); !slices.Contains(legs[i], disk) {
			legs[i] = append(legs[i], disk)
		}
	}
	for _, row := range raw.Report[0].Seg {
		name := strings.Trim(row["lv_name"], "[]")
		for i, extents := range strings.Fields(row["seg_pe_ranges"]) {
			switch {
			case strings.HasPrefix(name, volume+imageSuffix):
				add(name, extents)
			case name == volume && strings.HasPrefix(extents, "/dev/"):
				add(fmt.Sprint(i), extents)
			}
		}
	}
	return legs
}

// Volumes of each layout are made, filled, grown and deleted; they show nothing of those
// before them, keep their layout, and never have two legs on one disk.
func TestLayouts(t *testing.T) {
	machine.Kernel(t)
	for name, c := range map[string]struct {
		parameters map[string]string
		legs       int
		kind       string
	}{
		"striped":  {map[string]string{stripesKey: "2", stripeSizeKey: "16Ki"}, 2, "striped"},
		"mirrored": {map[string]string{raidKey: raid1}, mirrors, raid1},
	} {
		t.Run(name, func(t *testing.T) {
			group := name
			disks := newWideGroup(t, group, 28*mib, 44*mib, 52*mib)
			b, ctx := newBackend(t, group), t.Context()
			completed, err := b.CheckParameters(c.parameters)
			require.NoError(t, err)
			room := func() devices.Capacity {
				t.Helper()
				b.dropReport(group)
				capacity, err := b.GetCapacity(ctx, completed)
				require.NoError(t, err)
				return capacity
			}
			empty := room()
			// The free extents are in pieces, so that legs have several.
			others := []string{"lvcreate", "--yes", "--zero", "n", "--activate", "n", "--extents", "6", "--name", "others", group}
			for _, disk := range disks {
				others = append(others, disk+":1", disk+":3")
			}
			lvmOn(t, disks, others...)
			v := create(t, b, "volume", 8*mib, c.parameters)
			if d := find(t, b, v); !d.Fresh || d.Attached() {
				t.Errorf("new: %+v", d)
			}
			d := attach(t, b, v)
			mustBeZero(t, d.Path, 0, 8*mib)
			fill(t, d.Path, 8*mib)
			require.NoError(t, b.Grow(ctx, v, 13*mib))
			foretold := (13*mib + d.Unit - 1) / max(d.Unit, 1) * d.Unit
			d = find(t, b, v)
			if want := int64(16 * mib); d.Size != want || foretold != want {
				t.Errorf("grown to what was foretold as %d: %+v", foretold, d)
			}
			mustBeZero(t, d.Path, 8*mib, d.Size)
			mustHold(t, d.Path, 8*mib)
			fill(t, d.Path, d.Size)
			require.NoError(t, b.Detach(ctx, v))
			require.NoError(t, b.Grow(ctx, v, 24*mib)) // while it is not attached
			b = reopened(t, group)
			d = attach(t, b, v)
			mustBeZero(t, d.Path, 16*mib, 24*mib)
			mustHold(t, d.Path, 16*mib)

			at, err := b.GetVolume(ctx, v)
			if err != nil || fmt.Sprint(at.Parameters) != fmt.Sprint(completed) {
				t.Errorf("it is told to be of %v (%v), and was made of %v", at.Parameters, err, completed)
			}
			legs := legsOf(t, disks, group, "volume")
			if len(legs) != c.legs {
				t.Errorf("it is on %q", legs)
			}
			for i, leg := range legs {
				if len(leg) != 1 || i > 0 && slices.Contains(legs[0], leg[0]) {
					t.Errorf("its legs are on %q", legs)
				}
			}
			ids, err := b.ListVolumes(ctx)
			attached, attachedErr := b.Attached(ctx)
			if err != nil || attachedErr != nil || len(ids) != 1 || len(attached) != 1 || attached[0].Volume != v.ID {
				t.Errorf("volumes %q (%v), attached %+v (%v)", ids, err, attached, attachedErr)
			}
			require.NoError(t, b.Check(ctx))
			require.Class(t, b.Grow(ctx, v, 200*mib), state.ResourceExhausted, group)
			require.NoError(t, b.Detach(ctx, v))
			require.NoError(t, b.DeleteVolume(ctx, v))
			lvmOn(t, disks, "lvremove", "--yes", group+"/others")

			if got := room(); got != empty || got.Largest <= 0 {
				t.Errorf("room for %+v, and %+v before", got, empty)
			}
			largest := create(t, b, "largest", empty.Largest, c.parameters)
			mustBeZero(t, attach(t, b, largest).Path, 0, empty.Largest)
			require.NoError(t, b.Detach(ctx, largest))
			require.NoError(t, b.DeleteVolume(ctx, largest))
			_, err = b.CreateVolume(ctx, devices.CreateRequest{Name: "larger", Parameters: completed, Size: devices.SizeRange{Required: empty.Largest + 1}})
			require.Class(t, err, state.ResourceExhausted, group)
		})
	}
}

// mustHold fails unless a device begins with junk.
func mustHold(t *testing.T, path string, bytes int64) {
	t.Helper()
	for at := int64(0); at < bytes; at += mib {
		if got := readAt(t, path, at); string(got) != string(junk) {
			t.Fatalf("%s has lost what was written to it, in the MiB at byte %d", path, at)
		}
	}
}

// A mirror that loses either disk, before its first use or after, shows what was written
// and nothing of those before it, and that it lacks a disk is told.
func TestLostMirror(t *testing.T) {
	machine.Kernel(t)
	const group = "mirror"
	var disks []losable
	var nodes []string
	for i := range 2 {
		disk := newLosable(t, fmt.Sprintf("leg%d", i), 36*mib)
		fill(t, disk.node, 36*mib)
		disks, nodes = append(disks, disk), append(nodes, disk.node)
	}
	lvmOn(t, nodes, append([]string{"vgcreate", "--yes", group}, nodes...)...)
	t.Cleanup(func() { removeGroup(t, group, nodes...) })
	b, ctx := newBackend(t, group), t.Context()
	used := create(t, b, "used", 8*mib, map[string]string{raidKey: raid1})
	fill(t, attach(t, b, used).Path, 4*mib)
	require.NoError(t, b.Grow(ctx, used, 12*mib))

	for i, lost := range disks {
		lost.become(t, lost.broken)
		d := find(t, b, used)
		fill(t, d.Path, 4*mib)
		mustHold(t, d.Path, 4*mib)
		mustBeZero(t, d.Path, 4*mib, 12*mib)
		b.dropReport(group)
		if err := b.Check(ctx); !errors.As(err, new(*state.Degraded)) || !strings.Contains(err.Error(), group+"/used") {
			t.Errorf("without disk %d: %v", i, err)
		}
		measured, err := b.Measure(ctx)
		if err != nil || !slices.ContainsFunc(measured, func(m devices.Measurement) bool { return m.Name == "degraded_volumes" && m.Value == 1 }) {
			t.Errorf("without disk %d: %+v (%v)", i, measured, err)
		}
		require.NoError(t, b.Detach(ctx, used)) // as when the pod goes
		b = newBackend(t, group)                // and the node is booted
		d = attach(t, b, used)
		mustHold(t, d.Path, 4*mib)
		mustBeZero(t, d.Path, 4*mib, 12*mib)
		require.Class(t, b.Grow(ctx, used, 16*mib), state.ResourceExhausted, "lacks 1")
		if c, err := b.GetCapacity(ctx, map[string]string{groupKey: group, raidKey: raid1}); err != nil || c.Available != 0 {
			t.Errorf("without a disk there is room for %+v (%v)", c, err)
		}

		lost.become(t, lost.whole)
		lvmOn(t, nodes, "lvchange", "--refresh", group+"/used") // as the error says
		waitSynced(t, b, group)
		require.NoError(t, b.Check(ctx))
	}
	require.NoError(t, b.Grow(ctx, used, 16*mib))
	mustBeZero(t, find(t, b, used).Path, 12*mib, 16*mib)
	require.NoError(t, b.Detach(ctx, used))
}

// waitSynced waits until the mirrors of a group are the same on their disks.
func waitSynced(t *testing.T, b *Backend, group string) {
	t.Helper()
	for {
		b.dropReport(group)
		r, err := b.reportOf(t.Context(), group, 0, turnLimit)
		require.NoError(t, err)
		if v := r.volumes["used"]; v.flaw() == "" {
			return
		}
	}
}

// What a volume is made of goes with the last that needs it, also when LVM cannot help.
func TestDetachWithoutLVM(t *testing.T) {
	machine.Kernel(t)
	for name, parameters := range map[string]map[string]string{
		"mirror": {raidKey: raid1},
		"thin":   {poolKey: "thin"},
	} {
		t.Run(name, func(t *testing.T) {
			group := "away" + name
			disks := newWideGroup(t, group, 36*mib, 36*mib)
			if name == "thin" {
				lvmOn(t, disks, "lvcreate", "--yes", "--type", "thin-pool", "--size", "16m", "--poolmetadatasize", "4m", "--chunksize", "64k", "--name", "thin", group)
				lvmOn(t, disks, "lvchange", "--activate", "n", group+"/thin") // the pool goes with its last volume then
			}
			b := newBackend(t, group)
			v, other := create(t, b, "volume", 4*mib, parameters), create(t, b, "other", 4*mib, parameters)
			before := devicesOf(t, group)
			attach(t, b, other)
			beside := devicesOf(t, group)
			attach(t, b, v)
			real := b.lvm
			b.lvm = func(ctx context.Context, args ...string) ([]byte, error) {
				if args[0] == "lvchange" {
					return nil, errors.New("no disk answers")
				}
				return real(ctx, args...)
			}
			require.NoError(t, b.Detach(t.Context(), v))
			mustHave(t, group, beside)
			mustBeZero(t, find(t, b, other).Path, 0, 4*mib)
			require.NoError(t, b.Detach(t.Context(), other))
			mustHave(t, group, before)
			b.lvm = real
			mustBeZero(t, attach(t, b, v).Path, 0, 4*mib)
			require.NoError(t, b.Detach(t.Context(), v))
		})
	}
}

// mustHave fails the test unless these are the group's devices.
func mustHave(t *testing.T, group string, want []string) {
	t.Helper()
	if got := devicesOf(t, group); !slices.Equal(got, want) {
		t.Errorf("the devices are %q, not %q", got, want)
	}
}

// devicesOf returns the names of a group's devices.
func devicesOf(t *testing.T, group string) (names []string) {
	t.Helper()
	all, err := mapper.Having(uuidPrefix)
	require.NoError(t, err)
	for _, name := range all {
		if strings.HasPrefix(name, group+"-") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func readAt(t *testing.T, path string, at int64) []byte {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	got := make([]byte, mib)
	_, err = f.ReadAt(got, at)
	require.NoError(t, errors.Join(err, f.Close()))
	return got
}
