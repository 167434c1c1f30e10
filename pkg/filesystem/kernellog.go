package filesystem

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// KernelLog is the kernel's log from one moment on: only there do file systems say why they
// refuse to mount. It is for error texts, so whatever cannot be read is left out.
type KernelLog struct{ file *os.File }

// kernelLogs are open files of the kernel's log that are not in use: opening one takes 0.1
// ms, and each has its own position in the log.
var kernelLogs sync.Pool

// OpenKernelLog begins to listen now.
func OpenKernelLog() KernelLog {
	file, _ := kernelLogs.Get().(*os.File)
	if file == nil {
		var err error
		if file, err = rawfile.Open("/dev/kmsg", unix.O_RDONLY|unix.O_NONBLOCK, 0); err != nil {
			return KernelLog{}
		}
	}
	if _, err := unix.Seek(int(file.Fd()), 0, unix.SEEK_END); err != nil {
		_ = file.Close() // only read
		return KernelLog{}
	}
	return KernelLog{file}
}

// Close ends the listening.
func (l KernelLog) Close() {
	if l.file != nil {
		kernelLogs.Put(l.file)
	}
}

// About returns the first few warnings and errors that are about the device, which
// is mounted as a file system of the type. A record is "priority,facts;message" and
// comes with one read, see Documentation/ABI/testing/dev-kmsg in the kernel's sources.
func (l KernelLog) About(fsType, device string) string {
	const enough = 4
	var said []string
	buf := make([]byte, 8<<10)
	for l.file != nil && len(said) < enough {
		n, err := unix.Read(int(l.file.Fd()), buf)
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
