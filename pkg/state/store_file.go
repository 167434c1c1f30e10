package state

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/process"
)

const (
	// lockEvery is how often a lock that another process has is tried.
	lockEvery = 50 * time.Millisecond
	// holderLook is how often the process that has the lock is looked at. One that
	// was found dead at two looks is taken over.
	holderLook = time.Second
	// waitLogged is how often a wait for the lock is logged.
	waitLogged = 10 * time.Second
)

// lockFile opens the file at path and locks it with flock(2), shared for
// reading, else exclusive; it waits until ctx ends. Closing the file releases
// the lock. The file is the one that path names once the lock is held: whoever
// held it before may have renamed the one that was opened first. A lock for
// writing is taken from a process that is dead (process.Dead): dead is its id
// then, else 0.
func lockFile(ctx context.Context, path string, readOnly bool) (f *os.File, dead int, err error) {
	mode, how := os.O_RDWR|os.O_CREATE, unix.LOCK_EX
	if readOnly {
		mode, how = os.O_RDONLY, unix.LOCK_SH
	}
	for {
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
			return nil, 0, fmt.Errorf("it is no regular file (its mode is %s): remove it, or choose another state directory", info.Mode())
		}
		f, err := os.OpenFile(path, mode, 0o600)
		if err != nil {
			return nil, 0, err
		}
		same := false
		pid, err := lock(ctx, f, how)
		switch {
		case err == nil && pid == 0:
			same, err = stillAt(f, path)
		case err == nil:
			var mine *os.File
			if mine, err = takeOver(ctx, f, path, pid); mine != nil {
				return mine, pid, errors.Join(err, f.Close())
			}
		}
		if err == nil && same {
			return f, 0, nil
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, 0, err
		}
	}
}

// lock waits for the lock, until ctx ends. For an exclusive one it also returns,
// without the lock, when the process that has it is dead: dead is its id.
func lock(ctx context.Context, f *os.File, how int) (dead int, err error) {
	conn, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	tick := time.NewTicker(lockEvery)
	defer tick.Stop()
	since := time.Now()
	looked, logged := since, time.Time{}
	for {
		if err := flock(conn, how|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
			return 0, err
		}
		if now := time.Now(); now.Sub(logged) >= waitLogged {
			holder, err := process.LockHolder(f)
			if err != nil {
				return 0, err
			}
			klog.FromContext(ctx).Info("Waiting for another csi-node process that holds the store", "store", f.Name(), "holder", process.Name(holder), "waited", now.Sub(since).Round(time.Second))
			logged = now
		}
		if how == unix.LOCK_EX && time.Since(looked) >= holderLook {
			looked = time.Now()
			was := dead
			if dead, err = deadHolder(f); err != nil || dead != 0 && dead == was {
				return dead, err
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("waiting for another csi-node process that holds the store: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// deadHolder returns the process that has the lock of a file if it is dead, else 0.
func deadHolder(f *os.File) (int, error) {
	holder, err := process.LockHolder(f)
	if err != nil || holder == 0 {
		return 0, err
	}
	if dead, err := process.Dead(holder); err != nil || !dead {
		return 0, err
	}
	return holder, nil
}

// takeOver puts a copy of a file in its place, locked, because the lock on the
// file itself is that of a process which can neither give it up nor write any
// more. It returns nil if another process was faster. What is copied is whole: a
// commit that was cut short is none, as after every kill.
func takeOver(ctx context.Context, old *os.File, path string, dead int) (mine *os.File, err error) {
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return nil, err
	}
	copied := path + successorSuffix
	f, err := os.OpenFile(copied, os.O_RDWR|os.O_CREATE, 0o600)
	defer func() {
		if mine == nil && f != nil {
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			err = fmt.Errorf("taking over from %s, which was killed and hangs in the kernel: %w", process.Name(dead), err)
		}
	}()
	if err != nil {
		return nil, err
	}
	conn, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	// Who has the lock of the copy takes over; who comes later finds the path changed.
	if err := flock(conn, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if ours, err := stillAt(f, copied); err != nil || !ours {
		return nil, err
	}
	if first, err := stillAt(old, path); err != nil || !first {
		return nil, errors.Join(err, os.Remove(copied))
	}
	if err := f.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := io.Copy(f, io.NewSectionReader(old, 0, math.MaxInt64)); err != nil {
		return nil, errors.Join(err, os.Remove(copied))
	}
	if err := os.Rename(copied, path); err != nil {
		return nil, err
	}
	klog.FromContext(ctx).Info("Took the store over from a process that was killed and hangs in the kernel: it can run no instruction again", "store", path, "holder", process.Name(dead))
	return f, nil
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
