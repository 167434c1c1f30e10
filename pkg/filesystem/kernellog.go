package filesystem

import (
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// KernelLog is the kernel's log from one moment on: file systems tell there, and
// nowhere else, why they refuse to mount. It is for error texts, so whatever cannot be
// read is left out.
type KernelLog struct{ fd int }

// OpenKernelLog begins to listen now.
func OpenKernelLog() KernelLog {
	fd, err := unix.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return KernelLog{-1}
	}
	if _, err := unix.Seek(fd, 0, unix.SEEK_END); err != nil {
		unix.Close(fd)
		return KernelLog{-1}
	}
	return KernelLog{fd}
}

// Close ends the listening.
func (l KernelLog) Close() {
	if l.fd >= 0 {
		unix.Close(l.fd)
	}
}

// About returns the first few warnings and errors that are about the device, which
// is mounted as a file system of the type. A record is "priority,facts;message" and
// comes with one read, see Documentation/ABI/testing/dev-kmsg in the kernel's sources.
func (l KernelLog) About(fsType, device string) string {
	const enough = 4
	var said []string
	buf := make([]byte, 8<<10)
	for l.fd >= 0 && len(said) < enough {
		n, err := unix.Read(l.fd, buf)
		if err == unix.EPIPE || err == unix.EINTR { // records were overwritten before they were read
			continue
		}
		if err != nil || n <= 0 {
			break
		}
		facts, message, _ := strings.Cut(string(buf[:n]), ";")
		message, _, _ = strings.Cut(message, "\n")
		if isWarning(facts) && concerns(message, fsType, filepath.Base(device)) {
			said = append(said, message)
		}
	}
	return strings.Join(said, "; ")
}

// isWarning reports whether a record is a warning or worse; the lowest three bits
// of its priority are the level of syslog(2).
func isWarning(facts string) bool {
	const warning, levels = 4, 7
	priority, _, _ := strings.Cut(facts, ",")
	n, err := strconv.Atoi(priority)
	return err == nil && n&levels <= warning
}

// namesDevice reports whether a message is about a device: "XFS (loop3): why",
// "BTRFS error (device loop3): why".
func namesDevice(message, device string) bool {
	return strings.Contains(message, "("+device+")") ||
		strings.Contains(message, "(device "+device+")") || strings.Contains(message, "(device "+device+" ")
}

// concerns reports whether a message is about a device, or is one of a file system
// of the type that does not know its device yet; such a message may be about another
// mount of this moment.
func concerns(message, fsType, device string) bool {
	r := rules[fsType]
	return namesDevice(message, device) || r.logPrefix != "" && strings.HasPrefix(message, r.logPrefix) && strings.Contains(message, r.logWord)
}
