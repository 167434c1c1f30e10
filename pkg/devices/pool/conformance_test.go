package pool_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var (
	wantError = require.Class
	run       = machine.Command
)

// newPool makes a pool in a directory of the test, whose devices are all
// detached when the test ends, whatever became of it.
func newPool(t testing.TB) (p *pool.Pool, dir string) {
	t.Helper()
	machine.Kernel(t)
	return openPool(t, filepath.Join(t.TempDir(), "pool"))
}

func openPool(t testing.TB, dir string) (*pool.Pool, string) {
	t.Helper()
	p, err := pool.Open(dir)
	require.NoError(t, err)
	t.Cleanup(func() { detachAll(t, dir) })
	return p, dir
}

// detachAll detaches the loop devices over files below dir, and those over them.
func detachAll(t testing.TB, dir string) {
	t.Helper()
	mine := map[string]string{}
	for path, backing := range bound(t) {
		if strings.HasPrefix(backing, dir+"/") {
			mine[path] = backing
		}
	}
	for path, backing := range bound(t) {
		if mine[backing] != "" {
			detachLeft(t, path, backing)
		}
	}
	for path, backing := range mine {
		detachLeft(t, path, backing)
	}
}

// detachLeft detaches what a test has left, unless it goes by itself just now.
func detachLeft(t testing.TB, path, backing string) {
	t.Helper()
	was, err := machine.Detach(path, backing)
	require.NoError(t, err)
	if was {
		machine.AwaitDetached(path, backing)
		leaveAsNew(t, path)
	}
}

func losetupDetach(t testing.TB, path string) {
	t.Helper()
	machine.LosetupDetach(t, path)
	leaveAsNew(t, path)
}

// leaveAsNew takes from a free device what the tests of others are not to meet.
func leaveAsNew(t testing.TB, path string) {
	t.Helper()
	if !discardIsOff(path) {
		return
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	require.NoError(t, err)
	defer control.Close()
	number, err := strconv.Atoi(strings.TrimPrefix(path, "/dev/loop"))
	require.NoError(t, err)
	for _, request := range []uint{unix.LOOP_CTL_REMOVE, unix.LOOP_CTL_ADD} {
		err := unix.IoctlSetInt(int(control.Fd()), request, number)
		if err != nil && !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EEXIST) {
			t.Error(err)
		}
	}
}

// bound returns the backings of the loop devices that are bound, by the paths of
// their nodes.
func bound(t testing.TB) map[string]string {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	require.NoError(t, err)
	all := map[string]string{}
	for _, file := range files {
		if backing := sysfs(file); backing != "" {
			all["/dev/"+filepath.Base(filepath.Dir(filepath.Dir(file)))] = backing
		}
	}
	return all
}

// sysfs reads a file of sysfs; "" when there is none.
func sysfs(file string) string {
	raw, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

// discardIsOff reports whether a device refuses discards that its driver could do.
func discardIsOff(path string) bool {
	queue := "/sys/block/" + filepath.Base(path) + "/queue/"
	limit := sysfs(queue + "discard_max_hw_bytes")
	return limit != "" && limit != "0" && sysfs(queue+"discard_max_bytes") == "0"
}

// backend is a pool.Backend whose volumes are named by their ids, and what the
// engine keeps over its devices.
type backend struct {
	*pool.Backend
	*blockdev.Devices
	loops *loop.Devices
}

func of(id string) devices.Volume { return devices.Volume{ID: id} }

func (b *backend) Find(ctx context.Context, id string) (state.Device, error) {
	return b.Backend.Find(ctx, of(id))
}
func (b *backend) Attach(ctx context.Context, id string, readOnly bool) error {
	return b.Backend.Attach(ctx, of(id), readOnly)
}
func (b *backend) Detach(ctx context.Context, id string) error { return b.Backend.Detach(ctx, of(id)) }
func (b *backend) Grow(ctx context.Context, id string, bytes int64) error {
	return b.Backend.Grow(ctx, of(id), bytes)
}
func (b *backend) BeginFormat(ctx context.Context, id string) error {
	return b.Backend.BeginFormat(ctx, of(id))
}
func (b *backend) Erase(ctx context.Context, id string) error  { return b.Backend.Erase(ctx, of(id)) }
func (b *backend) Clear(ctx context.Context, id string) error  { return b.Backend.Clear(ctx, of(id)) }
func (b *backend) Unused(ctx context.Context, id string) error { return b.Backend.Unused(ctx, of(id)) }

func newBackend(t testing.TB, p *pool.Pool) *backend {
	t.Helper()
	loops, err := loop.New(t.Context())
	require.NoError(t, err)
	// What another package's test waits for to get again is not taken.
	loops.Reserve(loop.Numbers{Bound: machine.Bound})
	b, err := pool.NewBackend(t.Context(), p, loops)
	require.NoError(t, err)
	return &backend{b, blockdev.New(loops, b.VolumeAt), loops}
}

// setup returns a backend with one volume, "vol".
func setup(t testing.TB, how pool.Provisioning) (b *backend, data string) {
	t.Helper()
	p, _ := newPool(t)
	return newBackend(t, p), create(t, p, "vol", how)
}

// create makes a volume and returns the path of its data.
func create(t testing.TB, p *pool.Pool, id string, how pool.Provisioning) string {
	t.Helper()
	return createWith(t, p, id, how, 0)
}

func attach(t testing.TB, b *backend, volume string, readOnly bool) state.Device {
	t.Helper()
	require.NoError(t, b.Attach(t.Context(), volume, readOnly))
	return want(t, b, volume, state.DeviceAttached)
}

func want(t testing.TB, b *backend, volume string, want state.DeviceState) state.Device {
	t.Helper()
	d, err := b.Find(t.Context(), volume)
	if err == nil && d.Present() {
		d.Held, err = b.Held(t.Context(), d)
	}
	require.NoError(t, err)
	if d.State != want {
		t.Fatalf("volume %s is %s, want %s: %+v", volume, d.State, want, d)
	}
	return d
}

// openFile opens a file and closes it when the test ends, if close was not
// called before.
func openFile(t testing.TB, path string, flags int) (close func()) {
	t.Helper()
	f, err := os.OpenFile(path, flags, 0)
	require.NoError(t, err)
	close = func() {
		if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	}
	t.Cleanup(close)
	return close
}

func TestConformance(t *testing.T) {
	for _, how := range []pool.Provisioning{pool.Thick, pool.Thin} {
		t.Run(string(how), func(t *testing.T) {
			devicestest.Backend(t, func(t *testing.T) devicestest.Harness { return harness(t, how) })
		})
	}
}

// needy is a backend that attaches and grows nothing without what the CO says.
type needy struct {
	devices.Backend
	devices.Grower
}

func (n needy) refuse(v devices.Volume) error {
	if v.Publish["lun"] != "7" || v.Secrets.Get("key") != "s3cret" {
		return errors.New("it lacks what the CO said")
	}
	return nil
}

func (n needy) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	if err := n.refuse(v); err != nil {
		return err
	}
	return n.Backend.Attach(ctx, v, readOnly)
}

func (n needy) Grow(ctx context.Context, v devices.Volume, bytes int64) error {
	if err := n.refuse(v); err != nil {
		return err
	}
	return n.Grower.Grow(ctx, v, bytes)
}

// The suite is also one for backends for which the id is not enough.
func TestBackendThatNeedsMore(t *testing.T) {
	machine.Kernel(t)
	devicestest.Backend(t, func(t *testing.T) devicestest.Harness {
		h := harness(t, pool.Thick)
		open := h.Open
		h.Open = func(t *testing.T) devices.Backend {
			b := open(t)
			return needy{b, b.(devices.Grower)}
		}
		h.Volume = func(id string) devices.Volume {
			return devices.Volume{ID: id, Publish: map[string]string{"lun": "7"}, Secrets: devices.NewSecrets(map[string]string{"key": "s3cret"})}
		}
		return h
	})
}

func harness(t *testing.T, how pool.Provisioning) devicestest.Harness {
	p, dir := newPool(t)
	var last *backend
	return devicestest.Harness{
		Open: func(t *testing.T) devices.Backend {
			again, err := pool.Open(dir)
			require.NoError(t, err)
			last = newBackend(t, again)
			return last.Backend
		},
		Views: func() devicestest.Views { return last.Devices },
		Create: func(t *testing.T, name string) string {
			create(t, p, name, how)
			return name
		},
	}
}
