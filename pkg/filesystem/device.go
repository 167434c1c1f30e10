package filesystem

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// device is an open device node, or a regular file that stands for one.
type device struct {
	*os.File
	bytes  int64
	block  bool // a block device
	number state.DeviceNumber
	facts  state.Device // what the caller knows
	// unmounted: nothing is known to have it mounted here, and its page cache nothing that the
	// disk has not. Then that is read past the cache, which need not be filled and emptied.
	unmounted bool
}

// open opens a device for reading, with further flags of open(2). The node
// must be the device that the caller means: a path may have been given to
// another device since the caller looked.
func open(facts state.Device, flags int) (*device, error) {
	if facts.Path == "" {
		return nil, errors.New("there is no device node to open")
	}
	f, err := rawfile.Open(facts.Path, os.O_RDONLY|flags, 0)
	if err != nil {
		return nil, err
	}
	d := &device{File: f, facts: facts}
	if err := d.identify(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return d, nil
}

// again opens the device once more, with other flags of open(2).
func (d *device) again(flags int) (*device, error) {
	return open(state.Device{Path: d.Name(), Number: d.number}, flags)
}

func (d *device) identify() error {
	var st unix.Stat_t
	if err := unix.Fstat(int(d.Fd()), &st); err != nil {
		return fmt.Errorf("fstat %s: %w", d.Name(), err)
	}
	d.block = st.Mode&unix.S_IFMT == unix.S_IFBLK
	if !d.block && st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fmt.Errorf("%s is no block device", d.Name())
	}
	if d.block {
		d.number = devnode.NumberOf(st.Rdev)
	}
	if d.number != d.facts.Number && d.facts.Number != (state.DeviceNumber{}) {
		return fmt.Errorf("%s is device %s now, not %s", d.Name(), d.number, d.facts.Number)
	}
	var err error
	if d.bytes, err = d.Seek(0, io.SeekEnd); err != nil {
		return fmt.Errorf("size of %s: %w", d.Name(), err)
	}
	return nil
}

// readAt reads up to n bytes at an offset, fewer only at the end of the device.
func (d *device) readAt(offset, n int64) ([]byte, error) {
	return d.readInto(make([]byte, n), offset)
}

// readInto reads as many bytes as there is room for, fewer only at the end of the device.
func (d *device) readInto(room []byte, offset int64) ([]byte, error) {
	offset = max(offset, 0)
	b := room[:max(min(int64(len(room)), d.bytes-offset), 0)]
	_, err := d.ReadAt(b, offset)
	return b, err
}

// headBuffers are buffers for the heads of devices, which every look reads; aligned.
var headBuffers = sync.Pool{New: func() any {
	room := make([]byte, headSize+pageBytes)
	skip := -uintptr(unsafe.Pointer(&room[0])) % pageBytes
	return (*[headSize]byte)(room[skip:])
}}

// readHead reads the first headSize bytes, or all of a smaller device, into one of
// headBuffers; direct asks for what is on the disk and not in the page cache, where that
// can be done.
func (d *device) readHead(buffer *[headSize]byte, direct bool) ([]byte, error) {
	if !direct || d.setDirect(unix.O_DIRECT) != nil { // such as a file on a file system without O_DIRECT
		return d.readInto(buffer[:], 0)
	}
	head, err := d.readInto(buffer[:], 0)
	if back := d.setDirect(0); back != nil {
		return nil, back
	}
	if errors.Is(err, unix.EINVAL) { // direct reads want another alignment
		return d.readInto(buffer[:], 0)
	}
	return head, err
}

// setDirect sets O_DIRECT, or no flag, on the open device.
func (d *device) setDirect(flag int) error {
	_, err := unix.FcntlInt(d.Fd(), unix.F_SETFL, flag)
	return err
}

// openRoot opens the root of the file system that is mounted at path, which
// must be that of the device.
func (d *device) openRoot(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(fmt.Errorf("fstat %s: %w", path, err), f.Close())
	}
	if devnode.NumberOf(st.Dev) != d.number {
		return nil, errors.Join(fmt.Errorf("what is mounted at %s is device %s, not %s (%s)", path, devnode.NumberOf(st.Dev), d.number, d.Name()), f.Close())
	}
	return f, nil
}

// describeReadError tells a human what failed while the device was read.
func describeReadError(err error) string {
	var path *os.PathError
	if errors.As(err, &path) {
		err = path.Err
	}
	return fmt.Sprintf("nothing, because the device cannot be read: %v", err)
}

// joinFindings joins findings for humans.
func joinFindings(findings []string) string { return strings.Join(findings, " and ") }
