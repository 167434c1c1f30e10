package loop

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
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
func silence(t *testing.T, b *Backend, d state.Device, dir string) (again func()) {
	t.Helper()
	root, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(d.Path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("dirty"), 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetInt(int(root.Fd()), fiFreeze, 0); err != nil {
		t.Fatal(err)
	}
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
		awaitLooks(t, b)
	})
	t.Cleanup(again)
	for len(changed) == 0 {
		if _, err := b.askWithin(t.Context(), filepath.Base(d.Path)); err != nil {
			return again
		}
	}
	t.Fatalf("%s still answers", d.Path)
	return nil
}

// awaitLooks waits until no look at a device is under way, which would delay
// its detaching.
func awaitLooks(t *testing.T, b *Backend) {
	t.Helper()
	b.mu.Lock()
	var under []*look
	for _, l := range b.looks {
		under = append(under, l)
	}
	b.mu.Unlock()
	for _, l := range under {
		<-l.done
	}
}

func over(t *testing.T, data string) (names []string) {
	t.Helper()
	all, err := bound()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range all {
		if strings.HasPrefix(backingOf(name), data) {
			names = append(names, name)
		}
	}
	return names
}

// A device that does not answer when the plugin starts is not known to stand
// for its volume: that is no reason to attach the file once more, nor to say
// that nothing is attached. Other volumes do not wait for it.
func TestSilentDeviceIsNotAbsent(t *testing.T) {
	p, dir := poolOn(t, disk(t, 512, "ext4", 64<<20), "ext4", "")
	first := newBackend(t, p)
	data := create(t, p, "vol", pool.Thin)
	create(t, p, "other", pool.Thin)
	d := attach(t, first, "vol", false)
	again := silence(t, first, d, dir)
	b := newBackend(t, p)
	defer awaitLooks(t, b)
	defer again()
	wantError(t, b.Attach(t.Context(), "vol", false), state.Unavailable, "vol", d.Path)
	if names := over(t, data); len(names) != 1 {
		t.Errorf("the file is attached as %v", names)
	}
	_, err := b.Find(t.Context(), "vol")
	wantError(t, err, state.Unavailable, "vol", d.Path)
	wantError(t, b.Detach(t.Context(), "vol"), state.Unavailable, "vol", d.Path)
	wantError(t, b.Delete(t.Context(), "vol"), state.Unavailable, "vol", d.Path)

	want(t, b, "other", state.DeviceAbsent)
	attach(t, b, "other", false)
	if err := b.Detach(t.Context(), "other"); err != nil {
		t.Error(err)
	}
	if err := b.AttachView(t.Context(), attach(t, b, "other", false)); err != nil {
		t.Error(err)
	}

	again()
	awaitLooks(t, b)
	if now := want(t, b, "vol", state.DeviceAttached); now.Number != d.Number {
		t.Errorf("attached as %+v, before as %+v", now, d)
	}
	attach(t, b, "vol", false)
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

// What sysfs says of a backing cannot be read, as when there are no descriptors left.
func TestUnreadableBackingIsNotAbsent(t *testing.T) {
	if !elsewhere(t, func() {}) {
		return
	}
	b, data := setup(t, pool.Thin)
	link := filepath.Join(filepath.Dir(filepath.Dir(filepath.Dir(data))), "link")
	if err := os.Link(data, link); err != nil {
		t.Fatal(err)
	}
	path := machine.Losetup(t, link)
	t.Cleanup(func() { losetupDetach(t, path) })
	shown := filepath.Join(sysBlock, filepath.Base(path), "loop", "backing_file")
	if err := unix.Mount("/proc/self/mem", shown, "", unix.MS_BIND, ""); err != nil { // reading it is EIO
		t.Fatal(err)
	}
	err := b.Attach(t.Context(), "vol", false)
	if err := unix.Unmount(shown, 0); err != nil {
		t.Fatal(err)
	}
	if err == nil {
		t.Error("the file was attached twice")
	} else if !strings.Contains(err.Error(), path) {
		t.Errorf("the error does not name %s: %v", path, err)
	}
	if got := allocated(t, data); got > devicestest.Size {
		t.Errorf("%d bytes are allocated", got)
	}
}
