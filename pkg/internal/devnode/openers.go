package devnode

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// maxOpeners is how many processes an error names.
const maxOpeners = 5

// Openers names the processes that have a device open, for error texts. It
// looks through /proc, as far as this process may see it and until ctx ends;
// that processes and descriptors vanish meanwhile is no error.
func Openers(ctx context.Context, number state.DeviceNumber) string {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return fmt.Sprintf("processes that cannot be looked for: %v", err)
	}
	var found []string
	for _, entry := range entries {
		if ctx.Err() != nil || len(found) == maxOpeners {
			break
		}
		pid, err := strconv.Atoi(entry.Name())
		if err != nil || !hasOpen(pid, number) {
			continue
		}
		name, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "comm"))
		if err != nil {
			name = []byte("ended meanwhile")
		}
		found = append(found, fmt.Sprintf("process %d (%s)", pid, strings.TrimSpace(string(name))))
	}
	if len(found) == 0 {
		return "a process that is not visible here"
	}
	return strings.Join(found, ", ")
}

// hasOpen reports whether a process has a device open. The look at each open
// file does not ask the file's server (AT_STATX_DONT_SYNC), which may be dead.
func hasOpen(pid int, number state.DeviceNumber) bool {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false
	}
	for _, entry := range entries {
		var st unix.Statx_t
		err := unix.Statx(unix.AT_FDCWD, filepath.Join(dir, entry.Name()), unix.AT_STATX_DONT_SYNC, unix.STATX_TYPE, &st)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && st.Rdev_major == number.Major && st.Rdev_minor == number.Minor {
			return true
		}
	}
	return false
}
