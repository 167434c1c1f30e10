package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// newSuffix is that of a file being written, which will replace another.
const newSuffix = ".new"

// writeFile replaces a file, or makes it, in one step and durably: after a
// crash it has its old contents or the new. No two calls may meet on a path. It
// is not opened with O_TRUNC: that of a process which was killed and hung on it
// would empty what its successor has written meanwhile.
func writeFile(path string, contents []byte) (err error) {
	f, err := os.OpenFile(path+newSuffix, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(contents)
	if err == nil {
		err = f.Truncate(int64(len(contents)))
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(path+newSuffix))
	}
	if err := os.Rename(path+newSuffix, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

// syncDir makes the names in a directory durable.
func syncDir(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// noRoom gives errors of a full or limited file system their class.
func noRoom(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return state.Errorf(state.ResourceExhausted, "the pool has no room: %w", err)
	case errors.Is(err, unix.EFBIG):
		return state.Errorf(state.OutOfRange, "larger than a file can be in the pool: %w", err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return state.Errorf(state.FailedPrecondition, "the pool's file system cannot allocate blocks ahead (fallocate), which thick volumes take: keep the pool on ext4 or xfs, or ask for thin volumes: %w", err)
	}
	return err
}

// ignore returns nil for an error that is expected.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// wrap adds what was being done to an error, if there is one.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
