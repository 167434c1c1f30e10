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
	defer losetupDetach(t, path)
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

// A lease that did not last proves nothing: what was configured is detached at once.
func TestLostLeaseIsNoProof(t *testing.T) {
	backing, err := os.OpenFile(newFile(t, "vol").Path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer backing.Close()
	name := addLoop(t, ownNumber(t))
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	taken, err := bind(t.Context(), name, backing, &config, Shape{Sector: 512}, true, func() (bool, error) { return false, nil }) // though none was taken
	if err != nil || !taken {
		t.Errorf("taken by another: %t, %v", taken, err)
	}
	if !isFree(name) {
		t.Errorf("%s is left behind", name)
	}
}
