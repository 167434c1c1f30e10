package pool_test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var _ interface {
	devices.Backend
	devices.Grower
	devices.Formatter
	devices.Eraser
	devices.Clearer
	devices.Owner
	devices.Lister
	devices.Checker
	io.Closer
} = (*pool.Backend)(nil)

// openKind opens the backend as the engine does, with flags.
func openKind(t *testing.T, env devices.Environment, flags ...string) (*pool.Backend, error) {
	t.Helper()
	machine.Kernel(t)
	kind := pool.Kind()
	set := pflag.NewFlagSet(kind.Name, pflag.ContinueOnError)
	kind.Flags(set)
	require.NoError(t, set.Parse(flags))
	loops, err := loop.New(t.Context())
	require.NoError(t, err)
	loops.Reserve(loop.Numbers{Bound: machine.Bound})
	env.Loops = loops
	b, err := kind.Open(t.Context(), env)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = b.(io.Closer).Close() }) // again, perhaps
	return b.(*pool.Backend), nil
}

func TestKindRefusesFlags(t *testing.T) {
	for flag, value := range map[string]string{"--pool-dir": "pool", "--pool-reserve": "much", "--inline-max-size": "-1", "--inline-max-total": "101%"} {
		_, err := openKind(t, devices.Environment{StateDir: t.TempDir()}, "--pool-dir="+t.TempDir(), flag+"="+value)
		wantError(t, err, state.InvalidArgument, flag, value)
	}
	_, err := openKind(t, devices.Environment{StateDir: t.TempDir()}, "--pool-dir=/dev/null/pool")
	wantError(t, err, state.Unavailable, "--pool-dir /dev/null/pool")
}

// The limits are the pool's, and only one plugin has it at a time; who only looks
// takes no lock and changes nothing.
func TestKind(t *testing.T) {
	dir, env := filepath.Join(t.TempDir(), "pool"), devices.Environment{StateDir: t.TempDir()}
	b, err := openKind(t, env, "--pool-dir="+dir, "--inline-max-size=1Mi")
	require.NoError(t, err)
	if err := b.Check(t.Context()); err != nil && state.ClassOf(err) != state.ResourceExhausted {
		t.Error(err)
	}
	_, err = b.Pool().Create(t.Context(), pool.Volume{ID: "inline", Name: "inline", Bytes: 2 << 20, Provisioning: pool.Thin, Ephemeral: &pool.Owner{PodUID: "p", Target: "/t"}})
	wantError(t, err, state.InvalidArgument, "--inline-max-size")
	_, err = openKind(t, devices.Environment{StateDir: t.TempDir()}, "--pool-dir="+dir)
	wantError(t, err, state.Unavailable, "--pool-dir "+dir, "in use by process")
	look, err := openKind(t, devices.Environment{ObserveOnly: true}, "--pool-dir="+dir)
	if err != nil {
		t.Errorf("a look beside the plugin: %v", err)
	}
	require.NoError(t, errors.Join(look.Close(), b.Close()))
	if _, err := openKind(t, devices.Environment{StateDir: t.TempDir()}, "--pool-dir="+dir); err != nil {
		t.Errorf("after it was closed: %v", err)
	}
	if _, err := openKind(t, devices.Environment{ObserveOnly: true}, "--pool-dir="+filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a look made a pool")
	}
}

// With --pool-require-mount no pool is made on the disk below, and one that exists is taken.
func TestKindRequiresAMount(t *testing.T) {
	machine.Kernel(t)
	dir := filepath.Join(t.TempDir(), "pool")
	open := func(require bool) error {
		b, err := openKind(t, devices.Environment{StateDir: t.TempDir()}, "--pool-dir="+dir, fmt.Sprintf("--pool-require-mount=%t", require))
		if err == nil {
			err = b.Close()
		}
		return err
	}
	for _, make := range []func() error{func() error { return nil }, func() error { return os.Mkdir(dir, 0o700) }} {
		require.NoError(t, make())
		wantError(t, open(true), state.Unavailable, "--pool-dir "+dir, "mount the disk of the pool")
		if entries, err := os.ReadDir(filepath.Dir(dir)); err != nil || len(entries) > 1 {
			t.Errorf("beside it are %v, %v", entries, err)
		}
	}
	require.NoError(t, unix.Mount("disk", dir, "tmpfs", 0, ""))
	mounted := true
	t.Cleanup(func() {
		if mounted {
			require.NoError(t, machine.Unmount(dir))
		}
	})
	require.NoError(t, open(true))
	require.NoError(t, machine.Unmount(dir))
	mounted = false
	require.NoError(t, open(true)) // it is served without
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("in the place of its disk are %v, %v", entries, err)
	}
	require.NoError(t, os.Remove(dir+".uuid"))
	require.NoError(t, open(false))
	require.NoError(t, os.Remove(dir+".uuid"))
	require.NoError(t, open(true)) // it is a pool already
}

// A pool that is away is served without: what stands is taken down, there is no room, and all is as before once it is back.
func TestKindOfAPoolThatIsAway(t *testing.T) {
	dir, env := filepath.Join(t.TempDir(), "pool"), devices.Environment{StateDir: t.TempDir()}
	t.Cleanup(func() { detachAll(t, filepath.Dir(dir)) })
	flags := "--pool-dir=" + dir
	b, err := openKind(t, env, flags)
	require.NoError(t, err)
	create(t, b.Pool(), "vol", pool.Thin)
	restart := func(title string) {
		t.Helper()
		require.NoError(t, errors.Join(b.Close(), os.Rename(dir, dir+".away")))
		if b, err = openKind(t, env, flags); err != nil {
			t.Fatalf("%s: %v", title, err)
		}
		wantError(t, b.Check(t.Context()), state.Unavailable, dir, "mount it")
		if _, err := b.Owns(t.Context(), "vol"); err == nil {
			t.Errorf("%s: whose the volume is was told without the pool", title)
		}
		if room, err := (pool.Provisioner{Volumes: b.Pool()}).GetCapacity(t.Context(), nil); err != nil || room.Available != 0 {
			t.Errorf("%s: room without the pool: %+v, %v", title, room, err)
		}
	}
	restart("nothing is attached")
	wantError(t, b.Attach(t.Context(), of("vol"), false), state.Unavailable, "mount it")
	require.NoError(t, os.Rename(dir+".away", dir))
	require.NoError(t, errors.Join(b.Check(t.Context()), b.Attach(t.Context(), of("vol"), false)))

	restart("a device stands")
	require.NoError(t, b.Detach(t.Context(), of("vol")))
	require.NoError(t, b.Close())
}

// A pool whose marker is damaged is served without, likewise: nothing could be unpublished before somebody mends it.
func TestKindOfAPoolWithADamagedMarker(t *testing.T) {
	dir, env := filepath.Join(t.TempDir(), "pool"), devices.Environment{StateDir: t.TempDir()}
	t.Cleanup(func() { detachAll(t, filepath.Dir(dir)) })
	flags, marker := "--pool-dir="+dir, filepath.Join(dir, ".csi-node-pool")
	b, err := openKind(t, env, flags)
	require.NoError(t, err)
	create(t, b.Pool(), "vol", pool.Thin)
	require.NoError(t, errors.Join(b.Attach(t.Context(), of("vol"), false), b.Close()))
	whole, err := os.ReadFile(marker)
	require.NoError(t, errors.Join(err, os.Truncate(marker, 0)))
	if b, err = openKind(t, env, flags); err != nil {
		t.Fatalf("with a device that stands: %v", err)
	}
	wantError(t, b.Check(t.Context()), state.Unavailable, marker, "is damaged", "with the UUID that "+dir+".uuid holds")
	_, err = b.Pool().Create(t.Context(), pool.Volume{ID: "other", Name: "other", Bytes: 1 << 20, Provisioning: pool.Thin})
	if err == nil {
		t.Error("a volume was made in a pool that is not known to be the one seen before")
	}
	require.NoError(t, b.Detach(t.Context(), of("vol")))
	require.NoError(t, b.Close())
	looks := devices.Environment{ObserveOnly: true}
	b, err = openKind(t, looks, flags)
	require.NoError(t, err)
	require.NoError(t, errors.Join(b.Close(), os.WriteFile(marker, whole, 0o600)))
	if b, err = openKind(t, env, flags); err != nil {
		t.Fatalf("after it was mended: %v", err)
	}
	require.NoError(t, b.Close())
}

func TestOwns(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	for id, want := range map[string]bool{"vol": true, "other": false, "": false, "..": false, "a/b": false} {
		if owns, err := b.Owns(t.Context(), id); err != nil || owns != want {
			t.Errorf("%q: %t, %v", id, owns, err)
		}
	}
}

// What stands is listed, whoever attached it: also for a volume that is gone, and
// whatever another pool has attached is left out.
func TestAttached(t *testing.T) {
	b, data := setup(t, pool.Thin)
	other, _ := setup(t, pool.Thin)
	attach(t, other, "vol", false)
	create(t, b.Pool(), "gone", pool.Thin)
	create(t, b.Pool(), "unused", pool.Thin)
	d, gone := attach(t, b, "vol", false), attach(t, b, "gone", false)
	require.NoError(t, os.RemoveAll(filepath.Join(filepath.Dir(filepath.Dir(data)), "gone")))
	for _, b := range []*backend{b, newBackend(t, b.Pool())} {
		all, err := b.Attached(t.Context())
		if err != nil || len(all) != 2 {
			t.Fatalf("%+v, %v", all, err)
		}
		if a := all[0]; a.Volume != "" || a.Device.Number != gone.Number || !a.Device.Missing || a.Device.Backing == "" {
			t.Errorf("of a volume that is gone: %+v", a)
		}
		if a := all[1]; a.Volume != "vol" || a.Device != d {
			t.Errorf("%+v, want %+v", a, d)
		}
	}
}
