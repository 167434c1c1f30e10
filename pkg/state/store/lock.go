package store

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
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
	// lockSuccessor is of the file by which a lock is taken over; older versions
	// use that name, too.
	lockSuccessor = ".successor"
)

// acquire locks the lock file with flock(2), shared or exclusive, and waits until
// ctx ends. For an exclusive lock the file is made. Closing it releases the lock.
// It is the one that the path names once the lock is held: whoever held it before
// may have replaced the one that was opened first. An exclusive lock that a dead
// process has is left to it, and the store is taken over.
func (s *Store) acquire(ctx context.Context, how int) (*os.File, error) {
	for {
		f, err := openLock(s.lockPath(), how)
		if err != nil {
			return nil, err
		}
		dead, err := s.waitForLock(ctx, f, how)
		var mine *os.File
		switch {
		case err != nil:
		case dead != 0:
			if mine, err = s.takeOver(ctx, f, dead); err != nil {
				err = fmt.Errorf("taking over from %s, which was killed and hangs in the kernel: %w", process.Name(dead), err)
			}
		default:
			var ours bool
			if ours, err = stillAt(f, s.lockPath()); ours {
				return f, nil
			}
		}
		if err = errors.Join(err, f.Close()); mine != nil || err != nil {
			return mine, err
		}
	}
}

func openLock(path string, how int) (*os.File, error) {
	if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no regular file (its mode is %s): remove it, or choose another state directory", path, info.Mode())
	}
	if how == unix.LOCK_SH {
		return os.Open(path)
	}
	return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
}

// waitForLock waits for the lock, until ctx ends. For an exclusive one it also returns,
// without the lock, when the process that has it is dead: dead is its id.
func (s *Store) waitForLock(ctx context.Context, f *os.File, how int) (dead int, err error) {
	tick := time.NewTicker(lockEvery)
	defer tick.Stop()
	since := time.Now()
	looked, logged := since, time.Time{}
	for {
		if err := flock(f, how); !errors.Is(err, unix.EWOULDBLOCK) {
			return 0, err
		}
		if now := time.Now(); now.Sub(logged) >= waitLogged {
			holder, err := process.LockHolder(f)
			if err != nil {
				return 0, err
			}
			klog.FromContext(ctx).Info("Waiting for another csi-node process that holds the store", "store", s.path, "holder", process.Name(holder), "waited", now.Sub(since).Round(time.Second))
			logged = now
		}
		if how == unix.LOCK_EX && time.Since(looked) >= holderLook {
			looked = time.Now()
			was := dead
			if dead, err = s.dead(f); err != nil || dead != 0 && dead == was {
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

// takeOver puts a directory and a lock file of its own in the place of those of a
// dead process, which can neither give its lock up nor run an instruction. One
// call of each of its threads may yet end: within the old directory, where nobody
// reads any more, or at the name of a directory that was to succeed, which is gone
// by then. The directory comes first: who is killed in between leaves the old lock.
// It returns nil if another process was faster.
func (s *Store) takeOver(ctx context.Context, old *os.File, dead int) (mine *os.File, err error) {
	path, err := filepath.EvalSymlinks(s.lockPath())
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path+lockSuccessor, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if mine == nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if err := flock(f, unix.LOCK_EX); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if ours, err := stillAt(f, path+lockSuccessor); err != nil || !ours {
		return nil, err
	}
	first, err := stillAt(old, path)
	if first {
		// An older version's records are whole: a commit that was cut short is none.
		if err = f.Truncate(0); err == nil {
			_, err = io.Copy(f, io.NewSectionReader(old, 0, math.MaxInt64))
		}
		if err == nil {
			err = s.moveRecords()
		}
	}
	if err != nil || !first {
		return nil, errors.Join(err, os.Remove(path+lockSuccessor))
	}
	s.takenFrom.Store(int64(dead))
	klog.FromContext(ctx).Info("Took the store over from a process that was killed and hangs in the kernel: it can run no instruction again", "store", s.path, "holder", process.Name(dead))
	return f, os.Rename(path+lockSuccessor, path)
}

// moveRecords puts a directory with links to the records in the place of the
// store. They are not copied: a file is not written to while it is a record.
func (s *Store) moveRecords() error {
	d, err := replace(s.path, s.bootID, func(d *directory) error {
		entries, err := os.ReadDir(s.path)
		if errors.Is(err, os.ErrNotExist) { // of an older version
			return nil
		}
		for _, e := range entries {
			if strings.HasSuffix(e.Name(), suffix) {
				err = errors.Join(err, os.Link(filepath.Join(s.path, e.Name()), filepath.Join(d.root.Name(), e.Name())))
			}
		}
		return err
	})
	if err != nil {
		return err
	}
	return d.close()
}

// flock tries to lock, and waits for nobody.
func flock(f *os.File, how int) error {
	if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != nil {
		return fmt.Errorf("locking %s: %w", f.Name(), err)
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
