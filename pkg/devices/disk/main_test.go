package disk

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/devices/note"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var (
	wantError = require.Class
	run       = machine.Command
)

// newDisk makes a disk: a loop device over a file, which the backend does not know for one.
func newDisk(t testing.TB, bytes int64) (node, file string) {
	t.Helper()
	machine.Kernel(t)
	file = machine.Image(t, bytes)
	return plug(t, file), file
}

// plug attaches a file as a disk until the test ends, or unplug.
func plug(t testing.TB, file string, options ...string) (node string) {
	t.Helper()
	node = machine.Losetup(t, append(options, file)...)
	t.Cleanup(func() { unplug(t, node) })
	return node
}

func unplug(t testing.TB, node string) {
	t.Helper()
	views, err := (blockdev.Info{Path: node}).Loops()
	require.NoError(t, err)
	for _, view := range views {
		machine.LosetupDetach(t, view)
	}
	if f, err := os.Open(node); err == nil { // the read-only mode outlives the file
		if err := errors.Join(unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0), f.Close()); err != nil {
			t.Error(err)
		}
	}
	machine.LosetupDetach(t, node)
}

// newPartition plugs a file in as a disk that tells a serial number, and makes a partition of it.
// What sysfs has of the disk is then what is below dir.
func newPartition(t testing.TB, file string) (node, dir string) {
	t.Helper()
	disk := plug(t, file, "--partscan")
	run(t, "addpart", disk, "1", "2048", "2048") // sectors; the kernel here may not know any table
	name, dir := filepath.Base(disk), t.TempDir()
	sysfs, part := filepath.Join("/sys/devices/virtual/block", name), name+"p1"
	require.NoError(t, errors.Join(os.Mkdir(filepath.Join(dir, "queue"), 0o755), os.Mkdir(filepath.Join(dir, part), 0o755)))
	for _, path := range []string{
		"dev", "size", "ro", "uevent", "diskseq", "queue/logical_block_size",
		part + "/dev", part + "/size", part + "/ro", part + "/uevent", part + "/partition", part + "/start",
	} {
		text, err := os.ReadFile(filepath.Join(sysfs, path))
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(dir, path), text, 0o600))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "serial"), []byte("abc\n"), 0o600))
	run(t, "mount", "--bind", dir, sysfs)
	t.Cleanup(func() { run(t, "umount", "--lazy", sysfs) })
	return disk + "p1", dir
}

func newBackend(t testing.TB, libDir string) *Backend {
	t.Helper()
	b, err := New(devices.Environment{LibDir: libDir})
	require.NoError(t, err)
	return b
}

// newSet returns the backend as the engine has it.
func newSet(t testing.TB, libDir string) *devices.Set {
	t.Helper()
	facts, err := note.Open(libDir)
	require.NoError(t, err)
	b, err := New(devices.Environment{LibDir: libDir, Raw: facts.Raw})
	require.NoError(t, err)
	set := devices.NewSet(Name, map[string]devices.Backend{Name: b})
	set.KeepFacts(facts)
	return set
}

// at returns a volume whose context names a path.
func at(id, path string) devices.Volume {
	return devices.Volume{ID: id, Context: map[string]string{PathKey: path}}
}

func attach(t testing.TB, b devices.Backend, v devices.Volume, readOnly bool) state.Device {
	t.Helper()
	require.NoError(t, b.Attach(t.Context(), v, readOnly))
	return want(t, b, v, state.DeviceAttached)
}

func want(t testing.TB, b devices.Backend, v devices.Volume, want state.DeviceState) state.Device {
	t.Helper()
	d, err := b.Find(t.Context(), v)
	if err != nil || d.State != want {
		t.Fatalf("volume %s is %s, want %s: %+v, %v", v.ID, d.State, want, d, err)
	}
	return d
}

// attached returns a backend with a volume that is attached.
func attached(t *testing.T, readOnly bool) (b *Backend, v devices.Volume, node string) {
	t.Helper()
	b = newBackend(t, t.TempDir())
	node, _ = newDisk(t, size)
	v = at("v", node)
	attach(t, b, v, readOnly)
	return b, v, node
}

// rack is what gives disks to nodes: it knows which volume is which, and makes them larger.
type rack struct {
	*devices.Set
	mu    *sync.Mutex
	disks map[string][2]string // node and file, by volume
}

func (r rack) of(v devices.Volume) devices.Volume {
	r.mu.Lock()
	defer r.mu.Unlock()
	if disk, has := r.disks[v.ID]; has && v.Context == nil {
		v.Context = map[string]string{PathKey: disk[0]}
	}
	return v
}

func (r rack) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	return r.Set.Find(ctx, r.of(v))
}

func (r rack) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	return r.Set.Attach(ctx, r.of(v), readOnly)
}

func (r rack) Grow(ctx context.Context, v devices.Volume, bytes int64) error {
	r.mu.Lock()
	file := r.disks[v.ID][1]
	r.mu.Unlock()
	if info, err := os.Stat(file); err == nil && ctx.Err() == nil && info.Size() < bytes && bytes < 1<<30 {
		if err := os.Truncate(file, bytes); err != nil {
			return err
		}
	}
	return r.Set.Grow(ctx, r.of(v), bytes)
}

func TestConformance(t *testing.T) {
	devicestest.Backend(t, func(t *testing.T) devicestest.Harness {
		lib := t.TempDir()
		mu, disks := &sync.Mutex{}, map[string][2]string{}
		var views *blockdev.Devices
		return devicestest.Harness{
			Open: func(t *testing.T) devices.Backend {
				loops, err := loop.New(t.Context())
				require.NoError(t, err)
				loops.Reserve(loop.Numbers{Bound: machine.Bound})
				views = blockdev.New(loops, nil)
				return rack{newSet(t, lib), mu, disks}
			},
			Views: func() devicestest.Views { return views },
			Create: func(t *testing.T, name string) string {
				node, file := newDisk(t, devicestest.Size)
				mu.Lock()
				defer mu.Unlock()
				disks[name] = [2]string{node, file}
				return name
			},
			BadIDs:   []string{"", "a\x00b", strings.Repeat("x", 2000)},
			Existing: true,
		}
	})
}
