// Package mounttable reads the mount table of this process or of another one, whatever
// paths are in it: who may mount in a mount namespace of his own can make a line of any
// length, and the parser gives up a table with one of more than 64 KiB.
package mounttable

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// Own returns the mounts of this mount namespace, as mountinfo.GetMounts does.
func Own(filter mountinfo.FilterFunc) ([]*mountinfo.Info, error) {
	runtime.LockOSThread() // whose file it is
	defer runtime.UnlockOSThread()
	return read("/proc/thread-self/mountinfo", filter)
}

// Of returns the mounts of the mount namespace of a process, by its directory in /proc.
// os.ErrProcessDone: it has ended. After any other error they are unknown.
func Of(proc string, filter mountinfo.FilterFunc) ([]*mountinfo.Info, error) {
	infos, err := read(proc+"/mountinfo", filter)
	// The process is gone, or has no namespace or no root directory any more (mounts_open_common
	// in fs/proc_namespace.c): then the file cannot be opened.
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, fmt.Errorf("%w: %w", os.ErrProcessDone, err)
	}
	return infos, err
}

// read may call filter twice for a mount.
func read(path string, filter mountinfo.FilterFunc) ([]*mountinfo.Info, error) {
	table, err := rawfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return nil, err
	}
	defer table.Close()
	infos, err := mountinfo.GetMountsFromReader(table, filter)
	if !errors.Is(err, bufio.ErrTooLong) {
		return infos, err
	}
	if _, err := table.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	return mountinfo.GetMountsFromReader(&shortener{table: table}, filter)
}

// longest is what the parser gets of a field at most. A line with four such fields (root, mount
// point, source, options) is not too long for it. No path of a system call is as long, not even
// with nine of ten bytes escaped, as a space is by \040 (PATH_MAX is 4096); what is left of a
// longer one is no such path, either.
const longest = 15 << 10

// shortener reads a table without what its fields have behind the longest that they may be.
type shortener struct {
	table io.Reader
	field int // its length so far
}

func (s *shortener) Read(p []byte) (n int, err error) {
	for n == 0 && err == nil { // nothing may be left of many reads
		var all int
		all, err = s.table.Read(p)
		for _, b := range p[:all] {
			s.field++
			if b == ' ' || b == '\n' {
				s.field = 0
			}
			if s.field <= longest {
				p[n] = b
				n++
			}
		}
	}
	return n, err
}
