//go:build vm

package lvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// junk is what an earlier tenant has left.
var junk = bytes.Repeat([]byte("tenant "), mib)[:mib]

// fill writes junk to all of a device.
func fill(t *testing.T, path string, bytes int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	for at := int64(0); at < bytes; at += mib {
		_, err := f.WriteAt(junk, at)
		require.NoError(t, err)
	}
	require.NoError(t, errors.Join(f.Sync(), f.Close()))
}

// mustBeZero fails unless every byte of a device from an offset on is zero.
func mustBeZero(t *testing.T, path string, from, end int64) {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	chunk := make([]byte, mib)
	for at := from; at < end; at += mib {
		_, err := f.ReadAt(chunk, at)
		require.NoError(t, err)
		if len(bytes.TrimLeft(chunk, "\x00")) > 0 {
			t.Errorf("%s shows what an earlier tenant has left, in the MiB at byte %d", path, at)
			break
		}
	}
	require.NoError(t, f.Close())
}

// A volume has nothing of those that were there before, neither when it is made nor
// when it grows.
func TestEarlierTenant(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "tenant", 68*mib)
	newPoolOf(t, "tenant", disk, 32*mib)
	ctx := t.Context()
	for name, parameters := range map[string]map[string]string{"thick": nil, "thin": {poolKey: "thin"}} {
		t.Run(name, func(t *testing.T) {
			b := newBackend(t, "tenant")
			first := create(t, b, "first", 20*mib, parameters)
			fill(t, attach(t, b, first).Path, 20*mib)
			require.NoError(t, b.Detach(ctx, first))
			require.NoError(t, b.DeleteVolume(ctx, first))

			second := create(t, b, "second", 8*mib, parameters)
			if d := find(t, b, second); !d.Fresh || d.Attached() {
				t.Errorf("new: %+v", d)
			}
			d := attach(t, b, second)
			mustBeZero(t, d.Path, 0, 8*mib)
			require.NoError(t, b.Grow(ctx, second, 16*mib))
			d = find(t, b, second)
			if d.Size != 16*mib || !d.Fresh {
				t.Errorf("grown: %+v", d)
			}
			mustBeZero(t, d.Path, 0, 16*mib)

			fill(t, d.Path, 16*mib)
			require.NoError(t, b.Detach(ctx, second))
			require.NoError(t, b.Grow(ctx, second, 20*mib)) // while it is not attached
			mustBeZero(t, attach(t, b, second).Path, 16*mib, 20*mib)
			require.NoError(t, b.BeginFormat(ctx, second))
			require.NoError(t, b.Erase(ctx, second))
			mustBeZero(t, find(t, b, second).Path, 0, 20*mib)
			require.NoError(t, b.Detach(ctx, second))
			require.NoError(t, b.DeleteVolume(ctx, second))
		})
	}
}

// A volume whose zeroing was interrupted is nobody's device, and is zeroed from the start.
func TestInterruptedZeroing(t *testing.T) {
	machine.Kernel(t)
	disk := newPV(t, 2<<30)
	fill(t, disk, 68*mib)
	lvmOn(t, []string{disk}, "vgcreate", "--yes", "again", disk)
	t.Cleanup(func() { removeGroup(t, "again", disk) })
	b := newBackend(t, "again")
	ctx, v := t.Context(), create(t, b, "volume", 1280*mib, nil) // which is zeroed in two parts

	told, cancel := context.WithCancel(ctx)
	told = state.WithProgress(told, func(string) { cancel() }) // as soon as it has begun
	require.Class(t, b.Attach(told, v, false), state.Canceled, "zero")
	if d := find(t, b, v); d.Attached() {
		t.Errorf("a volume that was not zeroed: %+v", d)
	}
	if d, _, err := b.active(parsedID(t, v)); d != nil || err != nil {
		t.Errorf("it was left active: %+v (%v)", d, err)
	}

	// As a plugin leaves it that was killed.
	lvmOn(t, []string{disk}, "lvchange", "--activate", "y", "again/volume")
	if d := find(t, b, v); d.Attached() {
		t.Errorf("a volume that was not zeroed: %+v", d)
	}
	b = reopened(t, "again")
	if d := find(t, b, v); d.Attached() || d.Err != nil {
		t.Errorf("after a restart: %+v", d)
	}
	if d, _, err := b.active(parsedID(t, v)); d != nil || err != nil {
		t.Errorf("after a restart it is active: %+v (%v)", d, err)
	}
	d := attach(t, b, v)
	mustBeZero(t, d.Path, 0, 68*mib)
	fill(t, d.Path, mib)
	attach(t, reopened(t, "again"), v) // now it is not zeroed any more
	got := make([]byte, mib)
	f, err := os.Open(d.Path)
	require.NoError(t, err)
	_, err = f.ReadAt(got, 0)
	if err := errors.Join(err, f.Close()); err != nil || !bytes.Equal(got, junk) {
		t.Errorf("what was written is gone (%v)", err)
	}
}

func parsedID(t *testing.T, v devices.Volume) volumeID {
	t.Helper()
	id, own, err := parseID(v.ID)
	if !own || err != nil {
		t.Fatalf("%s: %t, %v", v.ID, own, err)
	}
	return id
}

// What a growth that was killed has left goes, and the volume is as large as before.
func TestInterruptedGrowth(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "growth", 68*mib)
	b := newBackend(t, "growth")
	ctx, v := t.Context(), create(t, b, "volume", 16*mib, nil)
	d := attach(t, b, v)
	lvmOn(t, []string{disk}, "lvcreate", "--yes", "--zero", "n", "--size", "40m", "--name", growthPrefix+"volume", "--addtag", tagPrefix+driverTag+"=csi-node.local", "--addtag", tagPrefix+growthTag, "growth")
	require.NoError(t, exec.Command("dmsetup", "suspend", deviceName("growth", "volume")).Run()) // as an lvm that was killed in the middle of a change
	b = newBackend(t, "growth")
	if c, err := b.GetCapacity(ctx, map[string]string{groupKey: "growth"}); err != nil || c.Available != 48*mib {
		t.Errorf("room for %+v (%v)", c, err)
	}
	fill(t, d.Path, 16*mib) // it does not wait for ever
	require.NoError(t, b.Grow(ctx, v, 60*mib))
	if d := find(t, b, v); d.Size != 60*mib {
		t.Errorf("grown: %+v", d)
	}
	require.Class(t, b.Grow(ctx, v, 72*mib), state.ResourceExhausted, "growth", "vgextend")
	require.NoError(t, b.Detach(ctx, v))
}

// A volume of a group that --lvm-groups names no more, or by its former name, also if it was
// renamed just now, is seen as long as it is active, and detached: else its mount would be
// taken for somebody else's.
func TestForgottenGroup(t *testing.T) {
	machine.Kernel(t)
	disk, name, ctx := newPV(t, 68*mib), "forgotten", t.Context()
	lvmOn(t, []string{disk}, "vgcreate", "--yes", name, disk)
	t.Cleanup(func() { removeGroup(t, name, disk) })
	b := newBackend(t, name)
	v := create(t, b, "volume", 4*mib, nil)
	for _, c := range []struct {
		groups, rename string
		running        bool
	}{{groups: ""}, {groups: "forgotten", rename: "renamed"}, {groups: "renamed", rename: "again", running: true}} {
		attached := attach(t, b, v)
		if c.rename != "" {
			lvmOn(t, []string{disk}, "vgrename", name, c.rename)
			name = c.rename
		}
		if !c.running {
			b = newBackend(t, c.groups)
		}
		d := find(t, b, v)
		if !d.Attached() || d.Number != attached.Number {
			t.Errorf("%+v: it is %+v", c, d)
		}
		release := devicestest.Hold(t, d.Path)
		require.Class(t, b.Detach(ctx, v), state.Unavailable, "in use")
		release()
		require.NoError(t, b.Detach(ctx, v))
		if d := find(t, b, v); d.Attached() {
			t.Errorf("detached: %+v", d)
		}
		b = reopened(t, name)
	}
}

// Another group of the same name is not taken for the volume's, whether both are there or one.
func TestOtherGroupOfTheName(t *testing.T) {
	machine.Kernel(t)
	ours, name := newPV(t, 68*mib), "same"
	lvmOn(t, []string{ours}, "vgcreate", "--yes", name, ours)
	t.Cleanup(func() { removeGroup(t, name, ours) })
	b := newBackend(t, "same")
	ctx, v := t.Context(), create(t, b, "volume", 4*mib, nil)
	theirs := newPV(t, 68*mib) // which is plugged in later
	lvmOn(t, []string{theirs}, "vgcreate", "--yes", "same", theirs)
	t.Cleanup(func() { removeGroup(t, "same", theirs) })
	lvmOn(t, []string{theirs}, "lvcreate", "--yes", "--activate", "n", "--zero", "n", "--size", "4m", "--name", "volume", "same")
	fill(t, attach(t, b, v).Path, 4*mib)

	b = newBackend(t, "same")
	if d := find(t, b, v); !d.Attached() || d.Err == nil {
		t.Errorf("both are there: %+v", d)
	}
	_, err := b.ListVolumes(ctx)
	require.Class(t, err, state.FailedPrecondition, "vgrename")
	require.NoError(t, b.Detach(ctx, v))
	require.Class(t, b.Attach(ctx, v, false), state.FailedPrecondition, "vgrename")

	lvmOn(t, []string{ours}, "vgrename", name, "moved")
	name = "moved"
	b = newBackend(t, "same")
	require.Class(t, b.Attach(ctx, v, false), state.FailedPrecondition, "another one")
	require.Class(t, b.DeleteVolume(ctx, v), state.FailedPrecondition, "another one")
	if d := find(t, b, v); d.Missing || d.Attached() || d.Err == nil {
		t.Errorf("another group: %+v", d)
	}
	b = reopened(t, "same,moved")
	if d := attach(t, b, v); d.Formatted != "" || d.Fresh != true {
		t.Errorf("in the group that was renamed: %+v", d)
	}
	require.NoError(t, b.Detach(ctx, v))
}

// hide makes disks silent to a backend, until it finds its disks anew.
func hide(b *Backend, hidden ...string) (unhide func()) {
	real := b.disks
	b.disks = func(ctx context.Context) (all []disk, err error) {
		all, err = real(ctx)
		for i := range all {
			if slices.Contains(hidden, all[i].path) {
				all[i] = disk{path: all[i].path, silent: true}
			}
		}
		return all, err
	}
	return func() { b.disks = real }
}

// A disk that does not answer for a while has its volumes, and its group takes new ones,
// when it answers again; and what is on a volume whose tags cannot be read is not guessed.
func TestSilentDisk(t *testing.T) {
	machine.Kernel(t)
	const group = "silent"
	disks := newWideGroup(t, group, 36*mib, 36*mib)
	b, ctx := newBackend(t, group), t.Context()
	v := create(t, b, "volume", 4*mib, nil)
	attach(t, b, v)
	require.NoError(t, b.BeginFormat(ctx, v))
	again := func() { b.dropReport(group); b.forgetDisks(group) }
	for _, disk := range disks {
		unhide := hide(b, disk)
		again()
		require.Class(t, b.EndFormat(ctx, v, "ext4"), state.Unavailable, "lacks 1", disk, "is not changed")
		if _, err := b.CreateVolume(ctx, devices.CreateRequest{Name: "more", Size: devices.SizeRange{Required: 4 * mib}}); err == nil {
			t.Error("a volume is made without a disk")
		}
		unhide()
	}
	unhide := hide(b, disks...)
	again()
	if d := find(t, b, v); !d.Attached() || d.Err == nil {
		t.Errorf("without its group it is %+v", d)
	}
	unhide()
	again()
	if d := find(t, b, v); !d.Formatting || d.Err != nil {
		t.Errorf("with its group it is %+v", d)
	}
	require.NoError(t, b.EndFormat(ctx, v, "ext4"))
	if lost := strings.TrimSpace(lvmOn(t, disks, "vgs", "--noheadings", "--options", "vg_missing_pv_count", group)); lost != "0" {
		t.Errorf("%s disks count as lost", lost)
	}
	create(t, b, "more", 4*mib, nil)
	require.NoError(t, b.Detach(ctx, v))
}

// What a pod writes to an encrypted or a raw volume is no disk of the node's.
func TestPodsGroupIsNoDisk(t *testing.T) {
	machine.Kernel(t)
	encrypted := mapper.LayerName([20]byte{1})
	for name, want := range map[string]bool{"theirs": true, "raw": false, encrypted: false} {
		d := newLosable(t, name, 36*mib)
		lvmOn(t, []string{d.node}, "vgcreate", "--yes", "inside", d.node)
		_, err := newBackend(t, "inside").ListVolumes(t.Context())
		require.NoError(t, err) // a node need not have a group
		below, err := blockdev.Look(d.below)
		require.NoError(t, err)
		disks, err := newFinder(func(number state.DeviceNumber) error {
			if name == "raw" && number == below.Number {
				return errors.New("it was a raw volume")
			}
			return nil
		})(t.Context())
		require.NoError(t, err)
		if _, _, err := membersOf("inside", "", disks); (err == nil) != want {
			t.Errorf("a group on %s: %v", name, err)
		}
		removeGroup(t, "inside", d.node)
	}
}

// losable is a disk that can be lost: a device over another, by the tables.
type losable struct{ name, node, below, whole, broken string }

func newLosable(t *testing.T, name string, bytes int64) losable {
	t.Helper()
	t.Setenv("DM_DISABLE_UDEV", "1") // as the guest has none
	below, sectors := newPV(t, bytes), bytes/512
	d := losable{
		name: name, below: below, whole: fmt.Sprintf("0 %d linear %s 0\n", sectors, below),
		// Its last sectors are there, so that what is below remains its own.
		broken: fmt.Sprintf("0 %d error\n%d 8 linear %s %d\n", sectors-8, sectors-8, below, sectors-8),
	}
	d.dmsetup(t, d.whole, "create", name)
	t.Cleanup(func() { d.dmsetup(t, "", "remove", "--retry", name) })
	d.node = nodeOf(t, name)
	return d
}

// nodeOf returns the node of a device of the device mapper.
func nodeOf(t *testing.T, name string) string {
	t.Helper()
	device, err := mapper.Find(name)
	if err != nil || device == nil {
		t.Fatalf("%s: %v", name, err)
	}
	node, err := devnode.PathOf(device.Number)
	require.NoError(t, err)
	return node
}

func (d losable) dmsetup(t *testing.T, table string, args ...string) {
	t.Helper()
	cmd := exec.Command("dmsetup", args...)
	cmd.Stdin = strings.NewReader(table)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("dmsetup %q: %v: %s", args, err, out)
	}
}

func (d losable) become(t *testing.T, table string) {
	t.Helper()
	d.dmsetup(t, table, "load", d.name)
	d.dmsetup(t, "", "suspend", "--noflush", d.name)
	d.dmsetup(t, "", "resume", d.name)
}

func write(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.WriteString(text)
	require.NoError(t, errors.Join(err, f.Sync(), f.Close()))
}

// newPoolOf makes a thin pool that fails writes at once when it is full.
func newPoolOf(t *testing.T, group, disk string, bytes int64) {
	t.Helper()
	newPool(t, group, disk, bytes)
	lvmOn(t, []string{disk}, "lvchange", "--errorwhenfull", "y", group+"/thin")
}

// A thin pool that is full takes no new volume, though none of its volumes is active, so that
// LVM does not say how full it is.
func TestFullPoolAsleep(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "asleep", 68*mib)
	newPoolOf(t, "asleep", disk, 32*mib)
	b, ctx, thin := newBackend(t, "asleep"), t.Context(), map[string]string{poolKey: "thin", "overcommit": "10"}
	v := create(t, b, "first", 48*mib, thin)
	w := create(t, b, "second", 8*mib, thin) // while the pool has room
	f, err := os.OpenFile(attach(t, b, v).Path, os.O_WRONLY, 0)
	require.NoError(t, err)
	_, err = f.Write(make([]byte, 31*mib)) // the pool has it in its blocks, though it is zeros
	require.NoError(t, errors.Join(err, f.Sync(), f.Close(), b.Detach(ctx, v)))
	lvmOn(t, []string{disk}, "lvchange", "--activate", "n", "asleep/thin") // as after a reboot
	b = newBackend(t, "asleep")
	parameters, err := b.CheckParameters(thin)
	require.NoError(t, err)
	request := devices.CreateRequest{Name: "third", Parameters: parameters, Size: devices.SizeRange{Required: 8 * mib}, Use: devices.Use{FSType: "ext4"}}
	_, err = b.CreateVolume(ctx, request)
	require.Class(t, err, state.ResourceExhausted, "% full")
	require.NoError(t, b.DeleteVolume(ctx, v))
	_, err = b.CreateVolume(ctx, request)
	require.NoError(t, err)
	if d, err := mapper.Find(deviceName("asleep", "thin")); d != nil || err != nil {
		t.Errorf("the pool stays active: %+v, %v", d, err)
	}
	require.NoError(t, b.DeleteVolume(ctx, w))
}

// outdate makes what a backend knows of a group an hour old.
func outdate(b *Backend, group string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.groups[group].read = b.groups[group].read.Add(-time.Hour)
}

// A group that was carried to another node and back is not what this one remembers: what was
// written to a raw volume there is not formatted over.
func TestCarriedThereAndBack(t *testing.T) {
	machine.Kernel(t)
	newGroup(t, "carried", 68*mib)
	b, there, ctx := newBackend(t, "carried"), newBackend(t, "carried"), t.Context()
	v := create(t, b, "volume", 4*mib, nil)
	attach(t, b, v)
	require.NoError(t, b.Detach(ctx, v))
	d := attach(t, there, v)
	require.NoError(t, there.BeginRaw(ctx, v))
	write(t, d.Path, "data")
	require.NoError(t, there.Detach(ctx, v))
	outdate(b, "carried")
	if d := find(t, b, v); !d.Fresh { // or this test is of no use
		t.Errorf("unattached, it is %+v", d)
	}
	require.Class(t, b.BeginFormat(ctx, v), state.FailedPrecondition, "published as a raw block device")
	if d := attach(t, b, v); d.Fresh || !d.Raw {
		t.Errorf("attached, it is %+v", d)
	}
	require.NoError(t, b.Detach(ctx, v))
}

// An older backup of a group's metadata says of a volume that nobody has used it. What pods have
// written since is not zeroed.
func TestRestoredMetadata(t *testing.T) {
	for _, noted := range []string{"attached", "detached"} {
		t.Run(noted, func(t *testing.T) {
			machine.Kernel(t)
			disk, ctx, lib := newGroup(t, noted, 68*mib), t.Context(), t.TempDir()
			notes := filepath.Join(lib, "lvm")
			open := func() *Backend {
				b, err := New(noted, devices.Environment{DriverName: "csi-node.local", StateDir: os.TempDir(), LibDir: lib, Raw: nobodys})
				require.NoError(t, err)
				return b
			}
			b := open()
			v := create(t, b, "volume", 4*mib, nil)
			backup := filepath.Join(t.TempDir(), "backup")
			lvmOn(t, []string{disk}, "vgcfgbackup", "--file", backup, noted)
			write(t, attach(t, b, v).Path, "data")
			attach(t, b, v)          // again
			if noted == "detached" { // a version that made no notes has attached it
				require.NoError(t, os.RemoveAll(notes))
				find(t, b, v)
			}
			require.NoError(t, b.Detach(ctx, v))
			lvmOn(t, []string{disk}, "vgcfgrestore", "--file", backup, noted)
			for _, b := range []*Backend{open(), open()} {
				require.Class(t, b.Attach(ctx, v, false), state.FailedPrecondition, "lvchange --deltag csi-node.unzeroed --deltag csi-node.fresh "+noted+"/volume", "vgcfgrestore", "clear-device "+v.ID+" --")
				if d := find(t, b, v); d.State != state.DeviceAbsent || d.Missing || d.Err != nil {
					t.Errorf("it is %+v", d)
				}
			}
			lvmOn(t, []string{disk}, "lvchange", "--deltag", "csi-node.unzeroed", "--deltag", "csi-node.fresh", noted+"/volume") // as the error says
			b = open()
			if got := readAt(t, attach(t, b, v).Path, 0); !bytes.HasPrefix(got, []byte("data")) {
				t.Errorf("it holds %.8q", got)
			}
			require.NoError(t, b.Detach(ctx, v))

			lvmOn(t, []string{disk}, "vgcfgrestore", "--file", backup, noted)
			b = open()
			require.NoError(t, b.Clear(ctx, v)) // an operator's word
			mustBeZero(t, attach(t, b, v).Path, 0, 4*mib)
			require.NoError(t, errors.Join(b.Detach(ctx, v), b.DeleteVolume(ctx, v)))
			if left, err := filepath.Glob(filepath.Join(notes, "*")); err != nil || len(left) > 0 {
				t.Errorf("the notes %q are left (%v)", left, err)
			}
		})
	}
}

// A clearing that was refused leaves no mark by which the volume would be erased later.
func TestRefusedClearing(t *testing.T) {
	machine.Kernel(t)
	disk, ctx := newGroup(t, "refused", 68*mib), t.Context()
	b := newBackend(t, "refused")
	v := create(t, b, "volume", 4*mib, nil)
	write(t, attach(t, b, v).Path, "data")
	require.NoError(t, errors.Join(b.BeginFormat(ctx, v), b.EndFormat(ctx, v, "ext4"), b.Detach(ctx, v)))
	lvmOn(t, []string{disk}, "lvchange", "--permission", "r", "refused/volume")
	outdate(b, "refused")
	require.Class(t, b.Clear(ctx, v), state.FailedPrecondition, "takes no writes")
	if d := find(t, b, v); d.Formatting || d.Formatted != "ext4" || d.Attached() {
		t.Errorf("refused: %+v", d)
	}
	lvmOn(t, []string{disk}, "lvchange", "--permission", "rw", "refused/volume")
	outdate(b, "refused")

	// An error does not say whether the mark was set: it is taken back.
	run, lost := b.lvm, errors.New("the answer is lost")
	for _, made := range []bool{true, false} {
		b.lvm = func(ctx context.Context, args ...string) (out []byte, err error) {
			if i := slices.Index(args, "csi-node.formatting"); i < 1 || args[i-1] != "--addtag" {
				return run(ctx, args...)
			}
			if made {
				_, err = run(ctx, args...)
			}
			return nil, errors.Join(lost, err)
		}
		if err := b.Clear(ctx, v); !errors.Is(err, lost) {
			t.Errorf("made %v: %v", made, err)
		}
		outdate(b, "refused")
		if d := find(t, b, v); d.Formatting || d.Formatted != "ext4" || d.Attached() {
			t.Errorf("made %v: %+v", made, d)
		}
	}
	b.lvm = run
	require.NoError(t, b.Clear(ctx, v))
	mustBeZero(t, attach(t, b, v).Path, 0, 4*mib)
	require.NoError(t, b.Detach(ctx, v))
}

// A thin pool that hands out what was in its blocks is refused.
func TestUnzeroedPool(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "leaky", 132*mib)
	newPool(t, "leaky", disk, 32*mib)
	b, class := newBackend(t, "leaky"), map[string]string{poolKey: "thin"}
	v := create(t, b, "volume", 4*mib, class)
	lvmOn(t, []string{disk}, "lvchange", "--zero", "n", "leaky/thin")
	outdate(b, "leaky")
	require.Class(t, b.Attach(t.Context(), v, false), state.FailedPrecondition, "--zero y")
	b = newBackend(t, "leaky")
	require.Class(t, b.Attach(t.Context(), v, false), state.FailedPrecondition, "--zero y")
	_, err := b.CreateVolume(t.Context(), devices.CreateRequest{Name: "more", Parameters: class, Size: devices.SizeRange{Required: 4 * mib}})
	require.Class(t, err, state.FailedPrecondition, "--zero y")
}

// What is not the driver's stays as it is.
func TestOthers(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "others", 68*mib)
	lvmOn(t, []string{disk}, "lvcreate", "--yes", "--zero", "n", "--size", "4m", "--name", "root", "others")
	b := newBackend(t, "others")
	ctx := t.Context()
	_, err := b.CreateVolume(ctx, devices.CreateRequest{Name: "root", Size: devices.SizeRange{Required: 4 * mib}})
	require.Class(t, err, state.AlreadyExists, "root")
	v := create(t, b, "v", 4*mib, nil)
	id := volumeID{parsedID(t, v).group, "root"}.String()
	require.NoError(t, b.DeleteVolume(ctx, devices.Volume{ID: id}))
	require.Class(t, b.Attach(ctx, devices.Volume{ID: id}, false), state.NotFound)
	if ids, err := b.ListVolumes(ctx); err != nil || !slices.Equal(ids, []string{v.ID}) {
		t.Errorf("%q, %v", ids, err)
	}
	if out := lvmOn(t, []string{disk}, "lvs", "--noheadings", "--options", "lv_name", "others"); !strings.Contains(out, "root") {
		t.Errorf("the group has %q", out)
	}
	root, err := mapper.Find(deviceName("others", "root"))
	if err != nil || root == nil || b.VolumeAt(root.Number) != "" {
		t.Errorf("the device %+v (%v) is said to be a volume", root, err)
	}
	d := attach(t, b, v)
	if id := b.VolumeAt(d.Number); id != v.ID {
		t.Errorf("the device of %s is said to be that of %q", v.ID, id)
	}
	release := devicestest.Hold(t, d.Path)
	require.Class(t, b.DeleteVolume(ctx, v), state.FailedPrecondition, "unstage")
	release()
	require.NoError(t, b.Detach(ctx, v))
}

// A disk is LVM's while logical volumes on it come and go.
func TestDiskIsFoundWhileVolumesGo(t *testing.T) {
	machine.Kernel(t)
	node := newPV(t, 16*mib)
	lvmOn(t, []string{node}, "vgcreate", "--yes", "coming", node)
	defer removeGroup(t, "coming", node)
	stop, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- func() error {
			for i := range 60 {
				create := exec.Command("dmsetup", "create", "coming-volume", "--uuid", fmt.Sprint(uuidPrefix, "volume", i))
				create.Stdin = strings.NewReader(fmt.Sprintf("0 8 linear %s 2048", node))
				for _, cmd := range []*exec.Cmd{create, exec.Command("dmsetup", "remove", "--retry", "coming-volume")} {
					if out, err := cmd.CombinedOutput(); err != nil {
						return fmt.Errorf("%w: %s", err, out)
					}
				}
			}
			return nil
		}()
		close(stop)
	}()
	missed, looks := 0, 0
	for going := true; going; looks++ {
		if _, fit := candidate(filepath.Base(node)); !fit || nested(filepath.Base(node)) {
			missed++
		}
		select {
		case <-stop:
			going = false
		default:
		}
	}
	require.NoError(t, <-ended)
	if missed > 0 {
		t.Errorf("at %d of %d looks %s was no disk of LVM", missed, looks, node)
	}
}
