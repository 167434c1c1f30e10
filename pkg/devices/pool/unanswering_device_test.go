package pool_test

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// Ioctls of linux/fs.h that package unix has no names for.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// silence makes a device not answer, as one on a dead disk: it is being given
// other sectors, for which the kernel writes its page cache out first, to a file
// system that is frozen. The func that is returned lets it answer again; so does
// the end of the test.
func silence(t *testing.T, d state.Device, dir string) (again func()) {
	t.Helper()
	root, err := os.Open(dir)
	require.NoError(t, err)
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	require.NoError(t, err)
	if _, err := f.WriteAt([]byte("dirty"), 1<<20); err != nil {
		t.Fatal(err)
	}
	require.NoError(t, unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0))
	changed := make(chan error, 1)
	go func() {
		err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_BLOCK_SIZE, 4096)
		changed <- errors.Join(err, unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_BLOCK_SIZE, 512), f.Close())
	}()
	again = sync.OnceFunc(func() {
		err := unix.IoctlSetInt(int(root.Fd()), fiThaw, 0)
		if err := errors.Join(err, <-changed, root.Close()); err != nil {
			t.Error(err)
		}
		awaitLooks(t, d.Path)
	})
	t.Cleanup(again)
	for len(changed) == 0 {
		if !answers(d.Path) {
			return again
		}
	}
	t.Fatalf("%s still answers", d.Path)
	return nil
}

// answers reports whether a device tells its backing within a second.
func answers(path string) bool {
	told := make(chan error, 1)
	go func() {
		f, err := os.Open(path)
		if err == nil {
			_, err = unix.IoctlLoopGetStatus64(int(f.Fd()))
			err = errors.Join(err, f.Close())
		}
		told <- err
	}()
	select {
	case <-told:
		return true
	case <-time.After(time.Second):
		return false
	}
}

// awaitLooks waits until no look at a device is under way, which would delay
// its detaching: it has the device open.
func awaitLooks(t *testing.T, path string) {
	t.Helper()
	for range 2000 {
		fds, err := filepath.Glob("/proc/self/fd/*")
		require.NoError(t, err)
		if !slices.ContainsFunc(fds, func(fd string) bool { link, err := os.Readlink(fd); return err == nil && link == path }) {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("%s is open still", path)
}

// over lists the devices over a file.
func over(t *testing.T, data string) (paths []string) {
	t.Helper()
	for path, backing := range bound(t) {
		if strings.HasPrefix(backing, data) {
			paths = append(paths, path)
		}
	}
	return paths
}

// A device that does not answer when the plugin starts is not known to stand
// for its volume: that is no reason to attach the file once more, nor to say
// that nothing is attached. Other volumes do not wait for it.
func TestSilentDeviceIsNotAbsent(t *testing.T) {
	p, dir := poolOn(t, disk(t, 512, "ext4", 64<<20), "ext4", "")
	silent := "silent-" + strings.ToLower(rand.Text()[:8]) // a device that says nothing may stand for whatever volume has the id, in other tests too
	first := newBackend(t, p)
	data := create(t, p, silent, pool.Thin)
	create(t, p, "other", pool.Thin)
	d := attach(t, first, silent, false)
	again := silence(t, d, dir)
	b := newBackend(t, p)
	defer awaitLooks(t, d.Path)
	defer again()
	wantError(t, b.Attach(t.Context(), silent, false), state.Unavailable, silent, d.Path)
	if names := over(t, data); len(names) != 1 {
		t.Errorf("the file is attached as %v", names)
	}
	_, err := b.Find(t.Context(), silent)
	wantError(t, err, state.Unavailable, silent, d.Path)
	wantError(t, b.Detach(t.Context(), silent), state.Unavailable, silent, d.Path)
	wantError(t, b.Delete(t.Context(), silent), state.Unavailable, silent, d.Path)

	want(t, b, "other", state.DeviceAbsent)
	attach(t, b, "other", false)
	require.NoError(t, b.Detach(t.Context(), "other"))
	require.NoError(t, b.AttachView(t.Context(), attach(t, b, "other", false)))

	again()
	awaitLooks(t, d.Path)
	for range 2000 { // the look itself ends a moment after it has closed the device
		if _, err := b.Find(t.Context(), silent); state.ClassOf(err) != state.Unavailable {
			break
		}
		time.Sleep(5 * time.Millisecond)
	}
	if now := want(t, b, silent, state.DeviceAttached); now.Number != d.Number {
		t.Errorf("attached as %+v, before as %+v", now, d)
	}
	attach(t, b, silent, false)
}

// A file that others read is nobody's, if all devices answer.
func TestReadersDoNotStopAnAttach(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		b, data := setup(t, pool.Thin)
		defer openFile(t, data, os.O_RDONLY)()
		attach(t, b, "vol", readOnly)
		if names := over(t, data); len(names) != 1 {
			t.Errorf("the file is attached as %v", names)
		}
	}
}
