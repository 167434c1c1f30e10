package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// waitLogged is how often a wait for the lock is logged.
const waitLogged = 10 * time.Second

// lockFile opens the file at path and locks it with flock(2), shared for
// reading, else exclusive; it waits until ctx ends. Closing the file releases
// the lock. The file is the one that path names once the lock is held: whoever
// held it before may have renamed the one that was opened first.
func lockFile(ctx context.Context, path string, readOnly bool) (*os.File, error) {
	mode, how := os.O_RDWR|os.O_CREATE, unix.LOCK_EX
	if readOnly {
		mode, how = os.O_RDONLY, unix.LOCK_SH
	}
	for {
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
			return nil, fmt.Errorf("it is no regular file (its mode is %s): remove it, or choose another state directory", info.Mode())
		}
		f, err := os.OpenFile(path, mode, 0o600)
		if err != nil {
			return nil, err
		}
		same := false
		if err = lock(ctx, f, how); err == nil {
			same, err = stillAt(f, path)
		}
		if err == nil && same {
			return f, nil
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
}

// lock waits for the lock in a goroutine, because flock(2) knows no context. If
// ctx ends first the goroutine stays until the lock is free, and the close of f
// that follows releases it then.
func lock(ctx context.Context, f *os.File, how int) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	err = flock(conn, how|unix.LOCK_NB)
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return err
	}
	locked := make(chan error, 1)
	go func() { locked <- flock(conn, how) }()
	tick := time.NewTicker(waitLogged)
	defer tick.Stop()
	for since := time.Now(); ; {
		klog.FromContext(ctx).Info("Waiting for another csi-node process that holds the store", "store", f.Name(), "waited", time.Since(since).Round(time.Second))
		select {
		case err := <-locked:
			return err
		case <-ctx.Done():
			return fmt.Errorf("waiting for another csi-node process that holds the store: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// flock locks while the runtime keeps the descriptor from being closed.
func flock(conn interface{ Control(func(fd uintptr)) error }, how int) error {
	var err error
	controlErr := conn.Control(func(fd uintptr) {
		for {
			if err = unix.Flock(int(fd), how); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	if err = errors.Join(controlErr, err); err != nil {
		return fmt.Errorf("locking the file: %w", err)
	}
	return nil
}

// stillAt reports whether path names the open file f.
func stillAt(f *os.File, path string) (bool, error) {
	opened, err := f.Stat()
	if err != nil {
		return false, err
	}
	named, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return os.SameFile(opened, named), nil
}

// setAside renames the file at path to a name that tells the time (UTC).
func setAside(path string) (string, error) {
	aside := path + ".corrupt-" + time.Now().UTC().Format("20060102T150405.000000000Z")
	if err := os.Rename(path, aside); err != nil {
		return "", err
	}
	return aside, nil
}
