// Package lease proves that nobody else has a file open, in whatever mount
// namespace and by whatever name: not a process, not a mapping, not a loop device.
package lease

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Take takes a write lease on an open file (fcntl(2), F_SETLEASE), which the
// kernel grants only if nobody else has it open. Until the file is closed, whoever
// opens it waits, at most for /proc/sys/fs/lease-break-time. It never blocks.
//
// EAGAIN: somebody has the file open, even if only for reading. Any other error means that
// this cannot be known, such as for a file of an overlay: its leases are on the overlay's
// own files and prove nothing.
func Take(f *os.File) error {
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return &os.PathError{Op: "fstatfs", Path: f.Name(), Err: err}
	}
	if fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
		return state.Errorf(state.FailedPrecondition, "lease on %s: on an overlay it proves nothing", f.Name())
	}
	return set(f, unix.F_WRLCK)
}

// Alone reports whether nobody else has an open file open at this moment. It holds the
// lease for no longer than the question takes, so that the file can be given to a
// loop device before and after: who is killed with a lease on a file that a device has
// leaves it there, and whoever opens the file next waits until the kernel breaks it.
func Alone(f *os.File) (bool, error) {
	switch err := Take(f); {
	case errors.Is(err, unix.EAGAIN):
		return false, nil
	case err != nil:
		return false, err
	}
	return true, drop(f)
}

// drop gives the lease back, if the kernel has not broken it already. Closing the file is
// not enough once a loop device has it, because the lease belongs to the open file.
func drop(f *os.File) error {
	if err := set(f, unix.F_UNLCK); !errors.Is(err, unix.EAGAIN) {
		return err
	}
	return nil
}

func set(f *os.File, kind int) error {
	if _, err := unix.FcntlInt(f.Fd(), unix.F_SETLEASE, kind); err != nil {
		return fmt.Errorf("lease on %s: %w", f.Name(), err)
	}
	return nil
}
