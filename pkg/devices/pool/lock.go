package pool

import (
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// pidBits hold every process id (PID_MAX_LIMIT in the kernel's include/linux/threads.h).
const pidBits = 22

// Lock keeps plugins with other state directories from the pool until unlock is
// called or the process has ended. Plugins with the same one may share it: the lock on
// their store lets only one of them work, and knows what to do about a holder that was
// killed and hangs in the kernel, which would still hold this lock too.
//
// It is an error, which names the holder, when another plugin has the pool.
func (p *Pool) Lock(stateDir string) (unlock func() error, err error) {
	var st unix.Stat_t
	if err := unix.Stat(stateDir, &st); err != nil {
		return nil, &os.PathError{Op: "stat", Path: stateDir, Err: err}
	}
	hash := fnv.New32a()
	fmt.Fprint(hash, st.Dev, " ", st.Ino)
	id := int64(hash.Sum32())

	// Not a file in the pool, which could not be unmounted then.
	f, err := p.openSeen()
	if err != nil {
		return nil, err
	}
	// Each plugin has a shared lock on one byte, whose place tells its state
	// directory and its process. The lock comes before the look at the others: of
	// two that start at once both may fail, and never none.
	own := unix.Flock_t{Type: unix.F_RDLCK, Start: id<<pidBits | int64(os.Getpid())&(1<<pidBits-1), Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &own); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	for _, others := range []unix.Flock_t{{Len: id << pidBits}, {Start: (id + 1) << pidBits}} { // Len 0 is to the end
		if others.Start == 0 && others.Len == 0 {
			continue
		}
		others.Type = unix.F_WRLCK
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &others)
		if err == nil && others.Type != unix.F_UNLCK {
			err = fmt.Errorf("it is in use by process %d (as the process itself counts, which may run in a container), a plugin with another --state-dir, and neither would see what the other changes: stop that one, or give this one another --pool-dir. If it was killed and does not end, a thread of it hangs in the kernel: start this one with that --state-dir, or reboot the node", others.Start&(1<<pidBits-1))
		}
		if err != nil {
			_ = f.Close()
			return nil, fmt.Errorf("lock the pool %s: %w", p.dir, err)
		}
	}
	return f.Close, nil
}

// openSeen opens <dir>.uuid, by the directory that symbolic links lead to: those
// who use the pool by different links must meet.
func (p *Pool) openSeen() (*os.File, error) {
	dir, err := filepath.EvalSymlinks(p.dir)
	if err != nil { // the pool is away
		return os.Open(p.dir + seenSuffix)
	}
	f, err := os.Open(dir + seenSuffix)
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	// Whole, and never in the place of one that another process has locked.
	fresh, err := os.CreateTemp(filepath.Dir(dir), filepath.Base(dir)+seenSuffix+"~")
	if err != nil {
		return nil, err
	}
	defer os.Remove(fresh.Name())
	_, err = fresh.WriteString(p.uuid + "\n")
	if err := errors.Join(err, fresh.Close()); err != nil {
		return nil, err
	}
	if err := ignore(os.Link(fresh.Name(), dir+seenSuffix), os.ErrExist); err != nil {
		return nil, err
	}
	return os.Open(dir + seenSuffix)
}
