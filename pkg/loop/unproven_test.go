package loop

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// What sysfs says of a backing cannot be read, as when there are no descriptors left.
func TestUnreadableBackingIsNotAbsent(t *testing.T) {
	s, to := newDevices(t), newFile(t, "vol")
	path := machine.Losetup(t, to.Path)
	name, dir := filepath.Base(path), t.TempDir()
	number, err := os.ReadFile(filepath.Join(sysBlock, name, "dev"))
	require.NoError(t, err)
	entries, err := os.ReadDir(sysBlock)
	require.NoError(t, err)
	for _, entry := range entries {
		if entry.Name() == name {
			continue
		}
		require.NoError(t, os.Symlink(filepath.Join(sysBlock, entry.Name()), filepath.Join(dir, entry.Name())))
	}
	put(t, filepath.Join(dir, name, "dev"), string(number))
	if err := os.MkdirAll(filepath.Join(dir, name, "loop", "backing_file"), 0o700); err != nil { // reading a directory fails
		t.Fatal(err)
	}
	real := sysBlock
	sysBlock = dir
	err = s.Attach(t.Context(), request(to, "vol"))
	sysBlock = real
	wantError(t, err, state.FailedPrecondition, path)
	if names := over(t, to.Path); len(names) != 1 {
		t.Errorf("the file is attached as %v", names)
	}
}

// What somebody opened since nobody had it open may be shown by his device, too: what was
// configured is detached at once.
func TestFileOpenedMeanwhile(t *testing.T) {
	to := newFile(t, "vol")
	name := addLoop(t, machine.FreeLoop(t))
	bindOver := func(backing *os.File, look func(*os.File) (bool, error)) (bool, error) {
		config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
		return newDevices(t).bind(t.Context(), name, backing, &config, Shape{Sector: 512}, true, look)
	}
	open := func() *os.File {
		f, err := os.OpenFile(to.Path, os.O_RDWR|unix.O_NONBLOCK, 0)
		require.NoError(t, err)
		return f
	}
	backing, other := open(), open()
	defer backing.Close()
	if taken, err := bindOver(backing, func(*os.File) (bool, error) { return false, nil }); err != nil || !taken {
		t.Errorf("taken by another: %t, %v", taken, err)
	}
	if !isFree(name) {
		t.Errorf("%s is left behind", name)
	}
	require.NoError(t, other.Close())
	// And no lease is left on it, for which whoever opens the file would wait, if it ends here.
	taken, err := bindOver(backing, func(*os.File) (bool, error) { return true, open().Close() })
	if err != nil || !taken {
		t.Errorf("shown: %t, %v", taken, err)
	}
}
