package mounts

import (
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernelLog is the kernel's log from one moment on: file systems tell there, and
// nowhere else, why they refuse to mount. It is for error texts, so what
// cannot be had is left out.
type kernelLog int

// listen begins to listen now.
func listen() kernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil {
		unix.Close(fd)
		return -1
	}
	return kernelLog(fd)
}

func (l kernelLog) close() {
	if l >= 0 {
		unix.Close(int(l))
	}
}

// about returns the first few warnings and errors that are about the device. A
// record is "priority,facts;message" and comes with one read, see
// Documentation/ABI/testing/dev-kmsg in the kernel's sources.
func (l kernelLog) about(fsType, device string) string {
	const enough = 4
	var said []string
	buf := make([]byte, 8<<10)
	for l >= 0 && len(said) < enough {
		n, err := again(func() (int, error) { return unix.Read(int(l), buf) })
		if err == unix.EPIPE { // records were overwritten before they were read
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		facts, message, _ := strings.Cut(string(buf[:n]), ";")
		message, _, _ = strings.Cut(message, "\n")
		if warns(facts) && concerns(message, fsType, filepath.Base(device)) {
			said = append(said, message)
		}
	}
	return strings.Join(said, "; ")
}

// warns reports whether a record is a warning or worse; the lowest three bits
// of its priority are the level of syslog(2).
func warns(facts string) bool {
	const warning, levels = 4, 7
	priority, _, _ := strings.Cut(facts, ",")
	n, err := strconv.Atoi(priority)
	return err == nil && n&levels <= warning
}

// names reports whether a message is about a device.
func names(message, device string) bool {
	return strings.Contains(message, "("+device+")") ||
		strings.Contains(message, "(device "+device+")") || strings.Contains(message, "(device "+device+" ")
}

// concerns reports whether a message is a file system's about a device: "XFS
// (loop3): why", "BTRFS error (device loop3): why". Before they know their
// device, which is while options are parsed, they name none; such a message may
// be about another mount of this moment.
func concerns(message, fsType, device string) bool {
	if names(message, device) {
		return true
	}
	switch fsType {
	case "ext4":
		return strings.HasPrefix(message, "EXT4-fs: ")
	case "xfs":
		return strings.HasPrefix(message, "XFS: ")
	case "btrfs":
		return strings.HasPrefix(message, "BTRFS") && strings.Contains(message, "(device <unknown>)")
	}
	return false
}
