package machine

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

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
