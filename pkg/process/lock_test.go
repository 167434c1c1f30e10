package process_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// A btrfs tells another device by stat(2) than by /proc/locks.
func TestLockHolder(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			device, dir := machine.Losetup(t, machine.Image(t, 128<<20)), t.TempDir()
			machine.Mkfs(t, fsType, "-q", device)
			require.NoError(t, unix.Mount(device, dir, fsType, 0, ""))
			defer func() { require.NoError(t, machine.Unmount(dir)) }()
			findsHolder(t, filepath.Join(dir, "file"))
		})
	}
}

func findsHolder(t *testing.T, path string) {
	f, err := os.Create(path)
	require.NoError(t, err)
	defer f.Close()
	holder := func(want int) {
		t.Helper()
		if got, err := process.LockHolder(f); err != nil || got != want {
			t.Errorf("holder %d, not %d (%v)", got, want, err)
		}
	}
	holder(0)
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	holder(os.Getpid())
	require.NoError(t, unix.Flock(int(f.Fd()), unix.LOCK_UN))
	child := exec.Command("flock", path, "sh", "-c", "echo locked; exec cat")
	in, err := child.StdinPipe()
	require.NoError(t, err)
	out, err := child.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, child.Start())
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "locked\n" {
		t.Fatal(line, err)
	}
	holder(child.Process.Pid)
	if name := process.Name(child.Process.Pid); !strings.Contains(name, "flock") || !strings.Contains(name, fmt.Sprint(child.Process.Pid)) {
		t.Errorf("it is called %q", name)
	}
	if name := process.Name(0); !strings.Contains(name, "not seen") {
		t.Errorf("nobody is called %q", name)
	}
	in.Close()
	require.NoError(t, child.Wait())
	holder(0)
}
