package machine

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

// Image makes a file of so many bytes that has no blocks.
func Image(t testing.TB, bytes int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	require.NoError(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, bytes)))
	return path
}

// ShortDir makes a directory, until the test ends, whose path is short enough for a socket's: that
// of t.TempDir has the name of the test in it.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "test-")
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// Allocated is how many bytes of a file have blocks.
func Allocated(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	require.NoError(t, unix.Stat(path, &st))
	return st.Blocks * 512 // see stat(2)
}

// ShutDown shuts the file system at a path down, as an error of its disk does, without a
// flush of its log.
func ShutDown(t testing.TB, path string) {
	t.Helper()
	const goingDown = 0x8004587d // FS_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
	f, err := os.Open(path)
	require.NoError(t, err)
	require.NoError(t, errors.Join(unix.IoctlSetPointerInt(int(f.Fd()), goingDown, 2), f.Close()))
}
