package mounts

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// fanotify gets an event for each mount, with its id and the process that made it
// (Linux 6.15, fanotify(7)); statmount(2) says what is behind an id.
type fanotify struct {
	group *os.File
	raw   syscall.RawConn // of group
	pid   int32
	buf   []byte
}

func newFanotify() (_ eventSource, err error) {
	fd, err := unix.FanotifyInit(unix.FAN_CLASS_NOTIF|unix.FAN_REPORT_MNT|unix.FAN_CLOEXEC|unix.FAN_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("fanotify_init: %w", err)
	}
	group := os.NewFile(uintptr(fd), "fanotify") // nonblocking, so Close ends a Read
	defer func() {
		if err != nil {
			err = errors.Join(err, group.Close())
		}
	}()
	namespace, err := os.Open("/proc/self/ns/mnt")
	if err != nil {
		return nil, err
	}
	defer namespace.Close()
	if err := unix.FanotifyMark(fd, unix.FAN_MARK_ADD|unix.FAN_MARK_MNTNS, unix.FAN_MNT_ATTACH|unix.FAN_MNT_DETACH, int(namespace.Fd()), ""); err != nil {
		return nil, fmt.Errorf("fanotify_mark: %w", err)
	}
	raw, err := group.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &fanotify{group: group, raw: raw, pid: int32(os.Getpid()), buf: make([]byte, 64<<10)}, nil
}

func (*fanotify) name() string { return "fanotify" }

// wait does not read: what was read must be applied before anybody relies on the events
// being complete, so take does both under one lock.
func (s *fanotify) wait() error {
	woken := false
	return s.raw.Read(func(fd uintptr) bool {
		if woken {
			return true
		}
		woken = true // if this returns false, it is called again when there are events
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := rawfile.Retry(func() (int, error) { return unix.Poll(fds, 0) })
		return n > 0 || err != nil // an error is met again by read
	})
}

func (s *fanotify) read() (changes []change, all bool, err error) {
	for {
		var n int
		var failed error
		if err := s.raw.Control(func(fd uintptr) {
			n, failed = rawfile.Retry(func() (int, error) { return unix.Read(int(fd), s.buf) })
		}); err != nil {
			return nil, false, err
		}
		switch {
		case failed == unix.EAGAIN:
			return changes, all, nil
		case failed != nil:
			return nil, false, os.NewSyscallError("read of fanotify", failed)
		}
		more, lost, err := s.parse(s.buf[:n])
		if err != nil {
			return nil, false, err
		}
		if changes, all = append(changes, more...), all || lost; len(s.buf)-n >= eventRoom {
			return changes, all, nil
		}
	}
}

const (
	eventSize    = int(unsafe.Sizeof(unix.FanotifyEventMetadata{}))
	infoSize     = 4  // struct fanotify_event_info_header
	infoMountID  = 8  // in struct fanotify_event_info_mnt
	infoMountLen = 16 // its size

	// eventRoom is more than an event of a mount takes: a read that leaves so much of the buffer
	// has emptied the queue.
	eventRoom = 256
)

// parse reads a run of struct fanotify_event_metadata, each with its records.
func (s *fanotify) parse(buf []byte) (changes []change, all bool, err error) {
	for len(buf) > 0 {
		if len(buf) < eventSize {
			return nil, false, fmt.Errorf("fanotify: %d bytes are no event", len(buf))
		}
		length := int(binary.NativeEndian.Uint32(buf))
		head := int(binary.NativeEndian.Uint16(buf[6:]))
		if length < head || length > len(buf) || head < eventSize || buf[4] != unix.FANOTIFY_METADATA_VERSION {
			return nil, false, fmt.Errorf("fanotify: an event of version %d with %d bytes, %d of them its head", buf[4], length, head)
		}
		mask := binary.NativeEndian.Uint64(buf[8:])
		c := change{
			attached: mask&unix.FAN_MNT_ATTACH != 0,
			detached: mask&unix.FAN_MNT_DETACH != 0,
			own:      int32(binary.NativeEndian.Uint32(buf[20:])) == s.pid,
		}
		if mask&unix.FAN_Q_OVERFLOW != 0 {
			all = true
		}
		for records := buf[head:length]; len(records) >= infoSize; {
			size := int(binary.NativeEndian.Uint16(records[2:]))
			if size < infoSize || size > len(records) {
				return nil, false, fmt.Errorf("fanotify: a record of %d bytes in %d", size, len(records))
			}
			if records[0] == unix.FAN_EVENT_INFO_TYPE_MNT && size >= infoMountLen {
				c.id = binary.NativeEndian.Uint64(records[infoMountID:])
				changes = append(changes, c)
			}
			records = records[size:]
		}
		buf = buf[length:]
	}
	return changes, all, nil
}

// list asks for the ids first, so a mount that goes meanwhile is left out.
func (*fanotify) list() (map[uint64]watchedMount, error) {
	all := map[uint64]watchedMount{}
	ids := make([]uint64, 1<<10)
	for last := uint64(0); ; {
		n, err := listmount(last, ids)
		if err != nil {
			return nil, err
		}
		for _, id := range ids[:n] {
			if e, err := statmount(id); err == nil {
				all[id] = e.watched()
			}
		}
		if n == 0 {
			return all, nil
		}
		last = ids[n-1]
	}
}

func (*fanotify) find(fd int, _ string) (uint64, watchedMount, error) {
	st, err := statx(fd, "", unix.STATX_MNT_ID_UNIQUE)
	if err != nil {
		return 0, watchedMount{}, fmt.Errorf("statx: %w", err)
	}
	e, err := statmount(st.Mnt_id)
	return st.Mnt_id, e.watched(), err
}

// listmount calls listmount(2) for all mounts that this process can reach,
// after the one with the id.
func listmount(after uint64, ids []uint64) (int, error) {
	req := mountIDRequest{size: uint32(unsafe.Sizeof(mountIDRequest{})), id: ^uint64(0), param: after} // LSMT_ROOT
	for {
		n, _, errno := unix.Syscall6(unix.SYS_LISTMOUNT, uintptr(unsafe.Pointer(&req)), uintptr(unsafe.Pointer(&ids[0])), uintptr(len(ids)), 0, 0, 0)
		switch errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, fmt.Errorf("listmount: %w", errno)
		}
	}
}

func (s *fanotify) close() error { return s.group.Close() }
