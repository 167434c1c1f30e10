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
	// legacySuccessor is of the copy by which intents.db is taken over; older
	// versions use that name, too.
	legacySuccessor = ".successor"
)

// opener opens a store.
type opener struct {
	// dead returns the process that has the lock of a file if it is dead, else 0.
	dead func(*os.File) (int, error)
}

// lockAt locks what open opens at the path with flock(2), shared or exclusive; it
// waits until ctx ends. Closing the file releases the lock. The file is the one
// that path names once the lock is held: whoever held it before may have renamed
// the one that was opened first. An exclusive lock that a dead process has is
// left to it, and succeed makes another file for the path, locked, or returns nil
// if somebody was faster: dead is the id of that process then, else 0.
func (o opener) lockAt(ctx context.Context, path string, how int, open func() (*os.File, error),
	succeed func(old *os.File, dead int) (*os.File, error)) (f *os.File, dead int, err error) {
	for {
		f, err := open()
		if err != nil {
			return nil, 0, err
		}
		same := false
		dead, err := o.lock(ctx, f, how)
		switch {
		case err == nil && dead == 0:
			same, err = stillAt(f, path)
		case err == nil:
			mine, err := succeed(f, dead)
			if err != nil {
				err = fmt.Errorf("taking over from %s, which was killed and hangs in the kernel: %w", process.Name(dead), err)
			}
			if mine != nil || err != nil {
				return mine, dead, errors.Join(err, f.Close())
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
func (o opener) lock(ctx context.Context, f *os.File, how int) (dead int, err error) {
	tick := time.NewTicker(lockEvery)
	defer tick.Stop()
	since := time.Now()
	looked, logged := since, time.Time{}
	for {
		if err := flock(f, how|unix.LOCK_NB); !errors.Is(err, unix.EWOULDBLOCK) {
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
			if dead, err = o.dead(f); err != nil || dead != 0 && dead == was {
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

// lockDirectory opens and locks the directory of the records; for an exclusive
// lock it is made. The caller has the lock of intents.db.
func (o opener) lockDirectory(ctx context.Context, path string, how int) (*os.File, int, error) {
	return o.lockAt(ctx, path, how, func() (*os.File, error) {
		if how == unix.LOCK_EX {
			if err := os.Mkdir(path, 0o700); err != nil && !errors.Is(err, os.ErrExist) {
				return nil, err
			}
		}
		if info, err := os.Stat(path); err == nil && !info.IsDir() {
			return nil, fmt.Errorf("it is no directory (its mode is %s): remove it, or choose another state directory", info.Mode())
		}
		return os.Open(path)
	}, func(_ *os.File, dead int) (*os.File, error) { return takeOver(ctx, path, dead) })
}

// takeOver puts a directory of its own in the place of one whose lock a dead
// process has, which can neither give it up nor run an instruction. One call of
// each of its threads may yet end: within the old directory, where nobody reads
// any more, or at the name of a directory that was to succeed, which is gone by
// then. Records are linked, not copied: what is a record's file is never written
// to. Who has the lock of intents.db is the only one to take over.
func takeOver(ctx context.Context, path string, dead int) (*os.File, error) {
	if err := removeSuccessors(path); err != nil {
		return nil, err
	}
	d, err := replace(path, func(d *directory) error { return linkRecords(path, d.path) })
	if err != nil {
		return nil, err
	}
	klog.FromContext(ctx).Info("Took the store over from a process that was killed and hangs in the kernel: it can run no instruction again", "store", path, "holder", process.Name(dead))
	return d.lock, d.root.Close() // the directory of before, which has its name by now, is removed by load
}

func linkRecords(from, to string) error {
	entries, err := os.ReadDir(from)
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), suffix) {
			err = errors.Join(err, os.Link(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())))
		}
	}
	return err
}

// lockLegacy opens and locks intents.db; for an exclusive lock it is made.
func (o opener) lockLegacy(ctx context.Context, path string, how int) (*os.File, int, error) {
	return o.lockAt(ctx, path, how, func() (*os.File, error) {
		if info, err := os.Stat(path); err == nil && !info.Mode().IsRegular() {
			return nil, fmt.Errorf("%s is no regular file (its mode is %s): remove it, or choose another state directory", path, info.Mode())
		}
		if how == unix.LOCK_SH {
			return os.Open(path)
		}
		return os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	}, func(old *os.File, _ int) (*os.File, error) { return takeOverLegacy(old, path) })
}

// takeOverLegacy puts a copy of intents.db in its place, as older versions do. It
// returns nil if another process was faster. What is copied is whole: a commit that
// was cut short is none, as after every kill.
func takeOverLegacy(old *os.File, path string) (mine *os.File, err error) {
	if path, err = filepath.EvalSymlinks(path); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path+legacySuccessor, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer func() {
		if mine == nil {
			err = errors.Join(err, f.Close())
		}
	}()
	if err := flock(f, unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	if ours, err := stillAt(f, path+legacySuccessor); err != nil || !ours {
		return nil, err
	}
	if first, err := stillAt(old, path); err != nil || !first {
		return nil, errors.Join(err, os.Remove(path+legacySuccessor))
	}
	if err := f.Truncate(0); err != nil {
		return nil, err
	}
	if _, err := io.Copy(f, io.NewSectionReader(old, 0, math.MaxInt64)); err != nil {
		return nil, errors.Join(err, os.Remove(path+legacySuccessor))
	}
	return f, os.Rename(path+legacySuccessor, path)
}

// flock locks while the runtime keeps the descriptor from being closed.
func flock(f *os.File, how int) error {
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
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
