package mounts

import (
	"errors"
	"fmt"
	"hash/maphash"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// mountinfoPoll is woken by the kernel when the table changes, without learning
// what has changed (proc_pid_mountinfo(5)). The kernel reports each change only once
// for a descriptor, so nothing else may poll it: it is no os.File, because the Go
// runtime's epoll(7) would poll that.
type mountinfoPoll struct {
	table int
	wake  int        // an eventfd that ends the poll
	mu    sync.Mutex // held while the descriptors are polled
	shut  bool       // the descriptors are closed, and perhaps others' by now

	// seen is a second descriptor of the table, for read: each change is reported to both.
	seen   int
	seenMu sync.Mutex // held while seen is polled; guards closed
	closed bool       // seen is
}

const tablePath = "/proc/self/mountinfo"

func newMountinfoPoll() (*mountinfoPoll, error) {
	table, err := unix.Open(tablePath, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: tablePath, Err: err}
	}
	seen, err := unix.Open(tablePath, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, errors.Join(&os.PathError{Op: "open", Path: tablePath, Err: err}, unix.Close(table))
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("eventfd: %w", err), unix.Close(table), unix.Close(seen))
	}
	return &mountinfoPoll{table: table, seen: seen, wake: wake}, nil
}

func (*mountinfoPoll) name() string { return "mountinfo" }

func (s *mountinfoPoll) wait() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shut {
		return os.ErrClosed
	}
	fds := []unix.PollFd{{Fd: int32(s.table), Events: unix.POLLPRI}, {Fd: int32(s.wake), Events: unix.POLLIN}}
	if _, err := rawfile.Retry(func() (int, error) { return unix.Poll(fds, -1) }); err != nil {
		return fmt.Errorf("poll %s: %w", tablePath, err)
	}
	if fds[1].Revents != 0 {
		return os.ErrClosed
	}
	return nil
}

func (s *mountinfoPoll) read() (changes []change, all bool, err error) {
	s.seenMu.Lock()
	defer s.seenMu.Unlock()
	if s.closed {
		return nil, false, os.ErrClosed
	}
	fds := []unix.PollFd{{Fd: int32(s.seen), Events: unix.POLLPRI}}
	n, err := rawfile.Retry(func() (int, error) { return unix.Poll(fds, 0) })
	if err != nil {
		return nil, false, fmt.Errorf("poll %s: %w", tablePath, err)
	}
	return nil, n > 0, nil
}

// whatSeed is of the hashes of what is mounted. The kernel gives an id again at once.
var whatSeed = maphash.MakeSeed()

func (*mountinfoPoll) list() (map[uint64]watchedMount, error) {
	infos, err := mounttable.Own(nil)
	all := make(map[uint64]watchedMount, len(infos))
	for _, i := range infos {
		e := entryOf(i)
		m := e.watched()
		m.what = maphash.Comparable(whatSeed, [4]string{e.device.String(), e.root, e.fsType, e.source})
		all[uint64(i.ID)] = m
	}
	return all, err
}

// find leaves out the attributes: the next list tells them.
func (*mountinfoPoll) find(fd int, point string) (uint64, watchedMount, error) {
	st, err := statx(fd, "", unix.STATX_MNT_ID)
	return st.Mnt_id, watchedMount{point: point}, err
}

func (s *mountinfoPoll) close() error {
	_, err := unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shut = true
	s.seenMu.Lock()
	defer s.seenMu.Unlock()
	s.closed = true
	return errors.Join(err, unix.Close(s.wake), unix.Close(s.table), unix.Close(s.seen))
}
