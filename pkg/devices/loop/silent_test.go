package loop

import (
	"crypto/rand"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

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
	silent := "silent-" + strings.ToLower(rand.Text()[:8]) // a device that says nothing may stand for whatever volume has the id, in other tests too
	first := newBackend(t, p)
	data := create(t, p, silent, pool.Thin)
	create(t, p, "other", pool.Thin)
	d := attach(t, first, silent, false)
	again := silence(t, first, d, dir)
	b := newBackend(t, p)
	defer awaitLooks(t, b)
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
	if err := b.Detach(t.Context(), "other"); err != nil {
		t.Error(err)
	}
	if err := b.AttachView(t.Context(), attach(t, b, "other", false)); err != nil {
		t.Error(err)
	}

	again()
	awaitLooks(t, b)
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

// What sysfs says of a backing cannot be read, as when there are no descriptors left.
func TestUnreadableBackingIsNotAbsent(t *testing.T) {
	b, data := setup(t, pool.Thin)
	path := machine.Losetup(t, data)
	defer losetupDetach(t, path)
	name, dir := filepath.Base(path), t.TempDir()
	number, err := os.ReadFile(filepath.Join(sysBlock, name, "dev"))
	if err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(sysBlock)
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range entries {
		if entry.Name() == name {
			continue
		}
		if err := os.Symlink(filepath.Join(sysBlock, entry.Name()), filepath.Join(dir, entry.Name())); err != nil {
			t.Fatal(err)
		}
	}
	put(t, filepath.Join(dir, name, "dev"), string(number))
	if err := os.MkdirAll(filepath.Join(dir, name, "loop", "backing_file"), 0o700); err != nil { // reading a directory fails
		t.Fatal(err)
	}
	real := sysBlock
	sysBlock = dir
	err = b.Attach(t.Context(), "vol", false)
	sysBlock = real
	wantError(t, err, state.FailedPrecondition, path)
	if names := over(t, data); len(names) != 1 {
		t.Errorf("the file is attached as %v", names)
	}
}

// A lease that did not last proves nothing: what was configured is detached at once.
func TestLostLeaseIsNoProof(t *testing.T) {
	_, data := setup(t, pool.Thin)
	backing, err := os.OpenFile(data, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer backing.Close()
	name := addLoop(t, ownNumber(t))
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	taken, err := bind(t.Context(), name, backing, &config, shape{sector: 512}, true, func() (bool, error) { return false, nil }) // though none was taken
	if err != nil || !taken {
		t.Errorf("taken by another: %t, %v", taken, err)
	}
	if !isFree(name) {
		t.Errorf("%s is left behind", name)
	}
}
