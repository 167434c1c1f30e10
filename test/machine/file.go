package machine

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// Allocated is how many bytes of a file have blocks.
func Allocated(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512 // see stat(2)
}

// ShutDown shuts the file system at a path down, as an error of its disk does, without a
// flush of its log.
func ShutDown(t testing.TB, path string) {
	t.Helper()
	const goingDown = 0x8004587d // FS_IOC_SHUTDOWN, XFS_IOC_GOINGDOWN
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(unix.IoctlSetPointerInt(int(f.Fd()), goingDown, 2), f.Close()); err != nil {
		t.Fatal(err)
	}
}
