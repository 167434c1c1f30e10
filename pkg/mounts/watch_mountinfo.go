package mounts

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// mountinfoPoll is woken by the kernel when the table changes, and not told
// what has changed (proc_pid_mountinfo(5)). Some kernels forget to wake it while
// other mount namespaces change, too (seen on Linux 6.18, one time in thirty),
// so the table is also read every so often.
type mountinfoPoll struct {
	table *os.File
	every time.Duration
	wake  int        // an eventfd that ends the poll
	mu    sync.Mutex // held while the descriptors are polled
	shut  bool       // the descriptors are closed, and perhaps others' by now
}

// pollEvery costs 0.3 ms a thousand mounts a second.
const pollEvery = 10 * time.Second

func newMountinfoPoll(every time.Duration) (*mountinfoPoll, error) {
	table, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("eventfd: %w", err), table.Close())
	}
	return &mountinfoPoll{table: table, every: every, wake: wake}, nil
}

func (*mountinfoPoll) name() string { return "mountinfo" }

func (s *mountinfoPoll) next() (changes []change, all bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.shut {
		return nil, false, os.ErrClosed
	}
	fds := []unix.PollFd{{Fd: int32(s.table.Fd()), Events: unix.POLLPRI}, {Fd: int32(s.wake), Events: unix.POLLIN}}
	if _, err := again(func() (int, error) { return unix.Poll(fds, int(s.every.Milliseconds())) }); err != nil {
		return nil, false, fmt.Errorf("poll %s: %w", s.table.Name(), err)
	}
	if fds[1].Revents != 0 {
		return nil, false, os.ErrClosed
	}
	return nil, true, nil
}

func (*mountinfoPoll) list() (map[uint64]string, error) {
	infos, err := mountinfo.GetMounts(nil)
	points := make(map[uint64]string, len(infos))
	for _, i := range infos {
		points[uint64(i.ID)] = i.Mountpoint
	}
	return points, err
}

func (s *mountinfoPoll) close() error {
	_, err := unix.Write(s.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.shut = true
	return errors.Join(err, unix.Close(s.wake), s.table.Close())
}
