package devnode_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// A loop device over a file whose path the kernel cannot tell is none over a disk, and must not keep
// all disks from their volumes.
func TestLoopsOfAPathThatIsTooLong(t *testing.T) {
	machine.Kernel(t)
	node := machine.Losetup(t, machine.Image(t, 1<<20))
	machine.LosetupDetach(t, node)
	name := strings.Repeat("x", 250)
	at, err := unix.Open(t.TempDir(), unix.O_PATH|unix.O_DIRECTORY, 0)
	require.NoError(t, err)
	for range 18 {
		require.NoError(t, unix.Mkdirat(at, name, 0o700))
		below, err := unix.Openat(at, name, unix.O_PATH|unix.O_DIRECTORY, 0)
		require.NoError(t, errors.Join(err, unix.Close(at)))
		at = below
	}
	fd, err := unix.Openat(at, "file", unix.O_RDWR|unix.O_CREAT, 0o600)
	require.NoError(t, errors.Join(err, unix.Ftruncate(fd, 1<<20), unix.Close(at)))
	f, err := os.OpenFile(node, os.O_RDWR, 0)
	require.NoError(t, err)
	require.NoError(t, unix.IoctlLoopConfigure(int(f.Fd()), &unix.LoopConfig{Fd: uint32(fd)}))
	t.Cleanup(func() {
		require.NoError(t, errors.Join(unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0), f.Close()))
	})
	require.NoError(t, unix.Close(fd))
	if _, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(node), "loop/backing_file")); !errors.Is(err, unix.ENAMETOOLONG) {
		t.Fatalf("its path is told: %v", err)
	}
	_, err = devnode.Loops()
	require.NoError(t, err)
}

// The node of some disks is in a directory of its own, which a container's /dev need not have.
func TestNodeInADirectoryThatIsMissing(t *testing.T) {
	machine.Kernel(t)
	node := machine.Losetup(t, machine.Image(t, 1<<20))
	number, ok := devnode.NumberAt(node)
	dir := "/dev/shm/" + filepath.Base(t.TempDir()) + filepath.Base(node)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	f, err := devnode.Open(filepath.Join(dir, "c0d0"), number, os.O_RDONLY)
	require.NoError(t, err)
	if at, made := devnode.NumberAt(f.Name()); !ok || !made || at != number {
		t.Errorf("%s is made as the node of %s, not of %s", f.Name(), at, number)
	}
	require.NoError(t, f.Close())
}
