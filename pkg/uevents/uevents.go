// Package uevents receives the kernel's events of block devices (NETLINK_KOBJECT_UEVENT,
// netlink(7)), the same that udev receives. Begin with Run.
package uevents

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	kernelGroup = 1 // the multicast group of the kernel; udev's own is 2
	// roomWanted is the size of the socket's buffer, in bytes: some thousand events. If a
	// storm of events does not fit, every volume is observed.
	roomWanted = 2 << 20
	// maxEvent is UEVENT_BUFFER_SIZE of linux/kobject.h with room for the header.
	maxEvent = 8 << 10
)

// Event is what has become of one block device.
type Event struct {
	Number state.DeviceNumber
	// Appeared: the device may be new or have new contents: it was added or changed.
	Appeared bool
	// Gone: what was on the device is not there any more: a loop device was detached, a
	// disk has another medium, or the device was removed.
	Gone bool
	// Resized: the device has another size.
	Resized bool
}

// Listener receives the kernel's events since Listen. It costs nothing while there are
// none.
type Listener struct {
	socket *os.File
	raw    syscall.RawConn
}

// Listen begins to collect events. Run, or else Close, ends it.
//
// FailedPrecondition: the kernel sends events only to network namespaces of the initial
// user namespace, so not to a pod with hostUsers: false.
func Listen() (_ *Listener, err error) {
	if err := reachable(); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.NETLINK_KOBJECT_UEVENT)
	if err != nil {
		return nil, fmt.Errorf("listen to the kernel's uevents: %w", err)
	}
	socket := os.NewFile(uintptr(fd), "uevents") // nonblocking, so Close ends a Read
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("listen to the kernel's uevents: %w", err), socket.Close())
		}
	}()
	if unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, roomWanted) != nil { // needs CAP_NET_ADMIN
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, roomWanted); err != nil {
			return nil, os.NewSyscallError("setsockopt", err)
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK, Groups: kernelGroup}); err != nil {
		return nil, os.NewSyscallError("bind", err)
	}
	raw, err := socket.SyscallConn()
	if err != nil {
		return nil, err
	}
	return &Listener{socket: socket, raw: raw}, nil
}

// reachable returns an error if no event of a device can arrive (the kernel's
// uevent_net_broadcast).
func reachable() error {
	raw, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	if fields := strings.Fields(string(raw)); len(fields) != 3 || fields[0] != "0" || fields[1] != "0" || fields[2] != "4294967295" {
		return state.Errorf(state.FailedPrecondition, "the kernel tells nothing of devices in a user namespace (hostUsers: false)")
	}
	return nil
}

// Run calls changed with each event of a block device, and all when events were
// lost, so that anything may have changed.
// It returns nil when ctx ends, and closes the Listener.
func (l *Listener) Run(ctx context.Context, changed func(Event), all func()) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() }) // ends the read; nothing is lost by an error
	defer stop()
	buf, lost := make([]byte, maxEvent), false
	for {
		n, from, err := l.receive(buf, !lost)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, unix.ENOBUFS):
			// Until all pending events are read, the kernel drops further ones without
			// reporting that again (netlink_overrun). So everything is observed only after
			// that.
			lost = true
		case errors.Is(err, unix.EAGAIN):
			lost = false
			all()
		case err != nil:
			return errors.Join(fmt.Errorf("hear the kernel's uevents: %w", err), l.Close())
		case fromKernel(from):
			if e, ok := parse(buf[:n]); ok {
				changed(e)
			}
		}
	}
}

// receive returns the next message. If there is none it waits, or returns EAGAIN.
func (l *Listener) receive(buf []byte, wait bool) (n int, from unix.Sockaddr, err error) {
	failed := l.raw.Read(func(fd uintptr) bool {
		err = rawfile.RetryErr(func() error {
			n, from, err = unix.Recvfrom(int(fd), buf, 0)
			return err
		})
		return err != unix.EAGAIN || !wait
	})
	if failed != nil {
		return 0, nil, failed
	}
	return n, from, err
}

// fromKernel leaves out what a process has sent to the group.
func fromKernel(from unix.Sockaddr) bool {
	sender, ok := from.(*unix.SockaddrNetlink)
	return ok && sender.Pid == 0
}

// Close ends a Listener that is not run.
func (l *Listener) Close() error { return l.socket.Close() }

// parse reads "action@devpath", and "KEY=value" for each fact, all ended by a
// NUL. It reports whether that is an event of a block device.
func parse(message []byte) (e Event, ok bool) {
	var action string
	block, major, minor := false, uint64(0), uint64(0)
	numbered := 0
	_, facts, _ := bytes.Cut(message, []byte{0})
	for fact := range bytes.SplitSeq(facts, []byte{0}) {
		key, value, found := bytes.Cut(fact, []byte("="))
		if !found {
			continue
		}
		var err error
		switch string(key) {
		case "ACTION":
			action = string(value)
		case "SUBSYSTEM":
			block = string(value) == "block"
		case "MAJOR":
			major, err = strconv.ParseUint(string(value), 10, 32)
			numbered++
		case "MINOR":
			minor, err = strconv.ParseUint(string(value), 10, 32)
			numbered++
		case "DISK_MEDIA_CHANGE":
			e.Gone = string(value) == "1"
		case "RESIZE":
			e.Resized = string(value) == "1"
		}
		if err != nil {
			return Event{}, false
		}
	}
	removed := action == "remove" || action == "offline"
	e.Gone, e.Appeared = e.Gone || removed, !removed
	e.Number = state.DeviceNumber{Major: uint32(major), Minor: uint32(minor)}
	return e, block && numbered == 2
}
