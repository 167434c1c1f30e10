// Package storagelock keeps two plugins from working on the same storage, such as a pool
// or a volume group. Plugins with the same state directory may share it: the lock of their
// store lets only one of them work at a time. Plugins with different state directories
// would not see each other's changes.
package storagelock

import (
	"fmt"
	"hash/fnv"
	"os"

	"golang.org/x/sys/unix"
)

// pidBits hold every process id (PID_MAX_LIMIT in the kernel's include/linux/threads.h).
const pidBits = 22

// Take locks storage for the plugins of a state directory. f is a file that stands for the
// storage; the lock lasts until f is closed or the process has ended. A plugin that was
// killed and hangs in the kernel still has its lock, and a successor with the same state
// directory is not kept out by it: what to do then, the lock of the store decides.
//
// The error names the process that has the lock for another state directory, and says
// what to do; instead says what can be done other than stopping that process.
func Take(f *os.File, stateDir, instead string) error {
	var st unix.Stat_t
	if err := unix.Stat(stateDir, &st); err != nil {
		return &os.PathError{Op: "stat", Path: stateDir, Err: err}
	}
	hash := fnv.New32a()
	fmt.Fprint(hash, st.Dev, " ", st.Ino)
	id := int64(hash.Sum32())

	// Each plugin has a shared lock on one byte, whose offset tells its state directory
	// and its process. It takes the lock before it looks for others: of two that start at
	// once both may fail, but both never succeed.
	own := unix.Flock_t{Type: unix.F_RDLCK, Start: id<<pidBits | int64(os.Getpid())&(1<<pidBits-1), Len: 1}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &own); err != nil {
		return fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	for _, others := range []unix.Flock_t{{Len: id << pidBits}, {Start: (id + 1) << pidBits}} { // Len 0 is to the end
		if others.Start == 0 && others.Len == 0 {
			continue
		}
		others.Type = unix.F_WRLCK
		err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &others)
		if err == nil && others.Type != unix.F_UNLCK {
			err = fmt.Errorf("it is in use by process %d (as the process itself counts, which may run in a container), a plugin with another --state-dir, and neither would see what the other changes: stop that one, or %s. If it was killed and does not end, a thread of it hangs in the kernel: start this one with that --state-dir, or reboot the node", others.Start&(1<<pidBits-1), instead)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
