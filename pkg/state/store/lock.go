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
	// lookTries is after how many tries the process that has the lock is looked at:
	// every second. One that was found dead at two looks is taken over.
	lookTries = 20
	// logTries is after how many tries a wait for the lock is logged: every ten seconds.
	logTries = 200
	// lockSuccessor ends the name of the file by which a lock is taken over; older versions
	// use that name, too.
	lockSuccessor = ".successor"
)

// acquire locks the lock file with flock(2), shared or exclusive, and waits until
// ctx ends. For an exclusive lock the file is made. Closing the file releases the lock.
// It is the file that is at the path once the lock is held, because an earlier holder may
// have replaced the one that was opened first. If a dead process has the lock, its lock
// file is replaced by another one.
func (s *Store) acquire(ctx context.Context, how int) (*held, error) {
	flags := os.O_RDWR | os.O_CREATE
	if how == unix.LOCK_SH {
		flags = os.O_RDONLY | unix.O_NONBLOCK // which does not wait for a pipe that is in the way
	}
	for {
		f, err := openHeld(s.lockPath(), flags)
		if err != nil {
			return nil, err
		}
		ours := false
		dead, err := s.waitForLock(ctx, f.File, how)
		switch {
		case err != nil:
		case dead == 0:
			ours, err = f.stillAt(s.lockPath())
		default:
			if err = s.takeOver(ctx, f, dead); err != nil {
				err = fmt.Errorf("taking over from %s, which was killed and hangs in the kernel: %w", process.Name(dead), err)
			}
		}
		if ours {
			return f, nil
		}
		if err = errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
}

// waitForLock waits for the lock, until ctx ends. For an exclusive one it also returns,
// without the lock, when the process that has it is dead: dead is its id.
func (s *Store) waitForLock(ctx context.Context, f *os.File, how int) (dead int, err error) {
	tick := time.NewTicker(lockEvery)
	defer tick.Stop()
	for tries := 0; ; tries++ {
		if err := unix.Flock(int(f.Fd()), how|unix.LOCK_NB); err != unix.EWOULDBLOCK {
			return 0, os.NewSyscallError("flock", err)
		}
		if tries%logTries == 0 {
			holder, _ := process.LockHolder(f) // or it is not seen
			klog.FromContext(ctx).Info("Waiting for another plugin process that holds the store", "store", s.path, "holder", process.Name(holder), "waited", time.Duration(tries)*lockEvery)
		}
		if how == unix.LOCK_EX && tries%lookTries == lookTries-1 {
			was := dead
			if dead, err = s.dead(f); err != nil || dead != 0 && dead == was {
				return dead, err
			}
		}
		select {
		case <-ctx.Done():
			return 0, fmt.Errorf("waiting for another plugin process that holds the store: %w", ctx.Err())
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

// takeOver puts a directory and a lock file that nobody has locked in the place of
// those of a dead process, which can neither give its lock up nor run an instruction.
// One call of each of its threads may yet end: within the old directory, where nobody
// reads any more, or at the name of a directory that was to succeed, which is gone
// by then. The directory comes first: who is killed in between leaves the old lock.
// It does nothing if another process is faster.
func (s *Store) takeOver(ctx context.Context, old *held, dead int) error {
	path := s.lockPath() + lockSuccessor
	f, err := openHeld(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return err
	}
	defer f.Close() // unlocks it; what was written is in the file
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == unix.EWOULDBLOCK {
		return nil
	} else if err != nil {
		return os.NewSyscallError("flock", err)
	}
	if ours, err := f.stillAt(path); err != nil || !ours {
		return err
	}
	first, err := old.stillAt(s.lockPath())
	if err == nil && first {
		// An older version's records are whole: a commit that was cut short is none.
		if err = f.Truncate(0); err == nil {
			_, err = io.Copy(f, io.NewSectionReader(old, 0, math.MaxInt64))
		}
		if err == nil {
			err = s.moveRecords()
		}
	}
	if err != nil || !first {
		return errors.Join(err, os.Remove(path))
	}
	s.takenFrom.Store(int64(dead))
	klog.FromContext(ctx).Info("Took the store over from a process that was killed and hangs in the kernel: it can run no instruction again", "store", s.path, "holder", process.Name(dead))
	return os.Rename(path, s.lockPath())
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

// held is an open file, and which one it is.
type held struct {
	*os.File
	device, inode uint64
}

func openHeld(path string, flags int) (*held, error) {
	f, err := os.OpenFile(path, flags, 0o600)
	if err != nil {
		return nil, err
	}
	return hold(f)
}

// hold closes the file if it cannot be told which one it is.
func hold(f *os.File) (*held, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(os.NewSyscallError("fstat", err), f.Close())
	}
	return &held{f, st.Dev, st.Ino}, nil
}

// stillAt reports whether the path names the file.
func (h *held) stillAt(path string) (bool, error) {
	var st unix.Stat_t
	err := unix.Stat(path, &st)
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	return err == nil && h.device == st.Dev && h.inode == st.Ino, os.NewSyscallError("stat", err)
}
