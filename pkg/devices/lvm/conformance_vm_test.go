//go:build vm

package lvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

const mib = 1 << 20

// The tests of this file run in a guest of test/vm, which has a device mapper.

// newPV makes a disk: a loop device over a file, which the backend does not know for one.
func newPV(t testing.TB, bytes int64) (node string) {
	t.Helper()
	return machine.Losetup(t, machine.Image(t, bytes))
}

// lvmOn runs lvm by hand, on disks.
func lvmOn(t testing.TB, disks []string, args ...string) string {
	t.Helper()
	out, err := newRunner("lvm", commandLimit)(t.Context(), append([]string{args[0], "--config", config(disks)}, args[1:]...)...)
	if err != nil {
		t.Fatalf("lvm %s: %v", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out))
}

// newGroup makes a volume group on a disk of its own, with a thin pool.
func newGroup(t testing.TB, name string, bytes int64) (disk string) {
	t.Helper()
	disk = newPV(t, bytes)
	lvmOn(t, []string{disk}, "vgcreate", "--yes", name, disk)
	t.Cleanup(func() { removeGroup(t, name, disk) })
	return disk
}

// removeGroup ends a group with all that is in it.
func removeGroup(t testing.TB, name string, disks ...string) {
	t.Helper()
	out, err := exec.Command("lvm", "vgremove", "--config", config(disks), "--force", "--force", "--yes", name).CombinedOutput()
	if err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

func newPool(t testing.TB, group, disk string, bytes int64) {
	t.Helper()
	lvmOn(t, []string{disk}, "lvcreate", "--yes", "--type", "thin-pool", "--size", mibs(bytes), "--poolmetadatasize", "4m", "--chunksize", "64k", "--name", "thin", group)
}

func mibs(bytes int64) string { return fmt.Sprintf("%dm", bytes/mib) }

func newBackend(t testing.TB, groups string) *Backend {
	t.Helper()
	b, err := New(groups, devices.Environment{DriverName: "csi-node.local", StateDir: os.TempDir(), Raw: nobodys})
	require.NoError(t, err)
	return b
}

// reopened returns the backend as after a restart, when it has read the groups.
func reopened(t testing.TB, groups string) *Backend {
	t.Helper()
	b := newBackend(t, groups)
	_, err := b.ListVolumes(t.Context())
	require.NoError(t, err)
	return b
}

// create makes a volume and returns what a CO tells of it.
func create(t testing.TB, b *Backend, name string, bytes int64, parameters map[string]string) devices.Volume {
	t.Helper()
	completed, err := b.CheckParameters(parameters)
	require.NoError(t, err)
	v, err := b.CreateVolume(t.Context(), devices.CreateRequest{Name: name, Parameters: completed, Size: devices.SizeRange{Required: bytes}, Use: devices.Use{FSType: "ext4"}})
	require.NoError(t, err)
	return devices.Volume{ID: v.ID, Context: v.Context}
}

func attach(t testing.TB, b *Backend, v devices.Volume) state.Device {
	t.Helper()
	require.NoError(t, b.Attach(t.Context(), v, false))
	d := find(t, b, v)
	if !d.Attached() || d.Err != nil {
		t.Fatalf("attached: %+v", d)
	}
	return d
}

func find(t testing.TB, b *Backend, v devices.Volume) state.Device {
	t.Helper()
	d, err := b.Find(t.Context(), v)
	require.NoError(t, err)
	return d
}

// clean ends the volumes of a group that a test has left.
func clean(t testing.TB, b *Backend, views *blockdev.Devices) {
	ctx := context.WithoutCancel(t.Context())
	for _, name := range b.names {
		b.dropReport(name)
	}
	ids, err := b.ListVolumes(ctx)
	if err != nil {
		t.Error(err)
	}
	for _, id := range ids {
		v := devices.Volume{ID: id}
		d, err := b.Find(ctx, v)
		if err == nil && d.Path != "" {
			err = views.DetachView(ctx, d)
		}
		if err = errors.Join(err, b.Detach(ctx, v), b.DeleteVolume(ctx, v)); err != nil {
			t.Error(err)
		}
	}
}

// abilities are those of a backend that makes no volumes.
type abilities interface {
	devices.Backend
	devices.Grower
	devices.Formatter
	devices.Eraser
	devices.Clearer
}

func TestConformance(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "suite", 4<<30)
	newPool(t, "suite", disk, 512*mib)
	for name, parameters := range map[string]map[string]string{"thick": nil, "thin": {poolKey: "thin"}} {
		t.Run(name, func(t *testing.T) {
			devicestest.Backend(t, func(t *testing.T) devicestest.Harness {
				var b *Backend
				var views *blockdev.Devices
				open := func(t *testing.T) devices.Backend {
					loops, err := loop.New(t.Context())
					require.NoError(t, err)
					loops.Reserve(loop.Numbers{Bound: machine.Bound})
					b, views = reopened(t, "suite"), blockdev.New(loops, nil)
					if parameters == nil {
						return b
					}
					return struct{ abilities }{b}
				}
				open(t)
				t.Cleanup(func() { clean(t, b, views) })
				return devicestest.Harness{
					Open:  open,
					Views: func() devicestest.Views { return views },
					Create: func(t *testing.T, name string) string {
						return create(t, b, name, devicestest.Size, parameters).ID
					},
				}
			})
		})
	}
}
