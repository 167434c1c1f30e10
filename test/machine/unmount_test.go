package machine

import (
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

// A program that is being started beside keeps what was open, for a moment.
func TestUnmountWhileProgramsStart(t *testing.T) {
	Kernel(t)
	dir := t.TempDir()
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) }) // it is, unless the test failed
	var (
		starters sync.WaitGroup
		running  atomic.Int32
	)
	defer starters.Wait()
	for range 3 {
		running.Add(1)
		starters.Go(func() {
			defer running.Add(-1)
			for range 200 {
				if err := exec.Command("true").Run(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for running.Load() > 0 {
		require.NoError(t, unix.Mount("test", dir, "tmpfs", 0, "size=1m"))
		if err := os.WriteFile(filepath.Join(dir, "file"), nil, 0o600); err != nil {
			t.Error(err)
		}
		require.NoError(t, Unmount(dir))
	}
}
