package loop

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

const controlPath = "/dev/loop-control"

// Tests have others.
var (
	sysBlock    = "/sys/block"
	maxPartPath = "/sys/module/loop/parameters/max_part"
)

// device is one bound loop device as the kernel described it.
type device struct {
	name     string // as "loop3"
	number   state.DeviceNumber
	info     unix.LoopInfo64
	bytes    int64
	sector   int // bytes, of a logical one
	readOnly bool
	sequence uint64 // another at each attach; 0: this kernel tells none
}

func (d *device) path() string             { return "/dev/" + d.name }
func (d *device) tag() string              { return unix.ByteSliceToString(d.info.File_name[:]) }
func (d *device) file() fileID             { return fileID{numberOf(d.info.Device), d.info.Inode} }
func (d *device) over() state.DeviceNumber { return numberOf(d.info.Rdevice) }
func (d *device) detaching() bool          { return d.info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0 }
func (d *device) direct() bool             { return d.info.Flags&unix.LO_FLAGS_DIRECT_IO != 0 }

// is reports whether the device has a shape, as far as it can be seen.
func (d *device) is(s shape) bool { return d.readOnly == s.readOnly && d.sector == s.sector }

// whole reports whether the device shows all of its backing.
func (d *device) whole() bool { return d.info.Offset == 0 && d.info.Sizelimit == 0 }

// isView reports whether the device is a view of ours.
func (d *device) isView() bool {
	return d.tag() == viewTag && d.whole() && d.info.Flags&unix.LO_FLAGS_READ_ONLY != 0
}

func (d *device) String() string {
	text := d.path()
	if backing := backingOf(d.name); backing != "" {
		text += " (backing " + backing
		if !d.whole() {
			text += fmt.Sprintf(", from byte %d", d.info.Offset)
		}
		text += ")"
	}
	return text
}

// facts puts what is known of the device into facts.
func (d *device) facts(facts *state.Device) {
	facts.State = state.DeviceAttached
	if d.detaching() {
		facts.State = state.DeviceDetaching
	}
	facts.Path, facts.Number = d.path(), d.number
	facts.Size, facts.ReadOnly = d.bytes, d.readOnly
}

// describe asks the kernel about an open device; nil when it is not bound.
func describe(f *os.File, name string) (*device, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	if errors.Is(err, unix.ENXIO) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "LOOP_GET_STATUS64", Path: f.Name(), Err: err}
	}
	d := &device{name: name, number: numberOf(st.Rdev), info: *info, sequence: sequenceOf(f)}
	if d.bytes, err = f.Seek(0, io.SeekEnd); err != nil {
		return nil, fmt.Errorf("size of %s: %w", f.Name(), err)
	}
	readOnly, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET)
	if err != nil {
		return nil, &os.PathError{Op: "BLKROGET", Path: f.Name(), Err: err}
	}
	d.readOnly = readOnly != 0
	if d.sector, err = unix.IoctlGetInt(int(f.Fd()), unix.BLKSSZGET); err != nil {
		return nil, &os.PathError{Op: "BLKSSZGET", Path: f.Name(), Err: err}
	}
	return d, nil
}

// sequenceOf returns the number that an open device got when it was last
// attached or detached, which no other has (BLKGETDISKSEQ, Linux 5.15); 0: none.
func sequenceOf(f *os.File) (n uint64) {
	const blkGetDiskSeq = 0x80081280 // linux/fs.h
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), blkGetDiskSeq, uintptr(unsafe.Pointer(&n))); errno != 0 {
		return 0
	}
	return n
}

// still reports whether an open device is attached as it was when d was asked.
func (d *device) still(f *os.File) bool { return d.sequence != 0 && sequenceOf(f) == d.sequence }

// ask opens a device for as long as it takes to describe it; nil when it is
// not bound, or being cleared (the open says ENXIO).
func ask(name string) (*device, error) {
	f, err := open(name, os.O_RDONLY)
	switch {
	case errors.Is(err, unix.ENXIO), errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, err
	}
	d, err := describe(f, name)
	return d, errors.Join(err, f.Close())
}

// setCapacity makes a device as large as what backs it is now.
func setCapacity(name string) error {
	f, err := open(name, os.O_RDONLY)
	if err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return errors.Join(&os.PathError{Op: "LOOP_SET_CAPACITY", Path: f.Name(), Err: err}, f.Close())
	}
	return f.Close()
}

// bound returns the names of the loop devices that sysfs does not show as free,
// which takes no open of any.
func bound() ([]string, error) {
	entries, err := os.ReadDir(sysBlock)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, entry := range entries {
		if name := entry.Name(); strings.HasPrefix(name, "loop") && !isFree(name) {
			names = append(names, name)
		}
	}
	return names, nil
}

// isFree reports whether sysfs shows that a device has no backing, or that there
// is no such device. What cannot be read is not free.
func isFree(name string) bool {
	backing, err := readBacking(name)
	return err == nil && backing == ""
}

// readBacking returns what sysfs names as the backing of a loop device; "" when
// the device is not bound. The kernel has the file only while it is.
func readBacking(name string) (string, error) {
	raw, err := os.ReadFile(filepath.Join(sysBlock, name, "loop", "backing_file"))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return "", nil
	}
	return string(bytes.TrimSuffix(raw, []byte("\n"))), err
}

// backingOf is readBacking for humans, and to tell whether a backing is another
// than before: "" when it cannot be read, too.
func backingOf(name string) string {
	backing, err := readBacking(name)
	if err != nil {
		return ""
	}
	return backing
}

// closeAfter closes f and joins the error, if any, to *err.
func closeAfter(f *os.File, err *error) { *err = errors.Join(*err, f.Close()) }
