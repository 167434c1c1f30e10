// Package durable replaces files so that a crash, or a loss of power, leaves them whole.
package durable

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// NewSuffix ends the name of a file that is being written to replace another.
const NewSuffix = ".new"

// Replace replaces a file, or makes it, in one step: after a crash it has its old contents or
// the new ones. Once SyncDir of its directory has returned it has the new ones. Calls for one
// path must not overlap.
//
// The file is not opened with O_TRUNC: such an open by a killed process that hangs would empty
// what its successor has written meanwhile.
func Replace(path string, contents []byte) error {
	f, err := os.OpenFile(path+NewSuffix, os.O_WRONLY|os.O_CREATE, 0o600)
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
		return errors.Join(err, os.Remove(path+NewSuffix))
	}
	return os.Rename(path+NewSuffix, path)
}

// LacksRoom reports whether an error says that a file system is full or limited.
func LacksRoom(err error) bool {
	return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT)
}

// SyncDir makes the names in a directory durable.
func SyncDir(path string) error {
	f, err := rawfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
