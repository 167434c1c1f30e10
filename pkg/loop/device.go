package loop

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	controlPath = "/dev/loop-control"
	sysClass    = "/sys/class/block"

	loopMajor = 7 // LOOP_MAJOR in the kernel's include/uapi/linux/major.h
)

// Tests replace these paths.
var (
	sysBlock    = "/sys/block"
	sysNumbers  = "/sys/dev/block"
	maxPartPath = "/sys/module/loop/parameters/max_part"
)

// Device is a bound loop device as the kernel described it.
type Device struct {
	name     string // such as "loop3"
	number   state.DeviceNumber
	info     unix.LoopInfo64
	bytes    int64
	sector   int // the logical sector size, in bytes
	readOnly bool
	sequence uint64 // a new one at each attach; 0: this kernel has none
}

// Path is the path of the device's node.
func (d *Device) Path() string { return "/dev/" + d.name }

// Number is the number of the device's node.
func (d *Device) Number() state.DeviceNumber { return d.number }

// Tag is the name (lo_file_name) that the device got when it was attached.
func (d *Device) Tag() string { return unix.ByteSliceToString(d.info.File_name[:]) }

// File is the file, or the node, that the device shows.
func (d *Device) File() FileID { return FileID{devnode.NumberOf(d.info.Device), d.info.Inode} }

// Backing is what sysfs names as what the device shows, for humans; "" if it is not known.
func (d *Device) Backing() string { return state.Plain(backingOf(d.name)) }

// Bytes is the size of the device.
func (d *Device) Bytes() int64 { return d.bytes }

// ReadOnly reports whether the device refuses writes.
func (d *Device) ReadOnly() bool { return d.readOnly }

// Detaching reports whether the device goes when the last one closes it.
func (d *Device) Detaching() bool { return d.info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0 }

func (d *Device) over() state.DeviceNumber { return devnode.NumberOf(d.info.Rdevice) }
func (d *Device) direct() bool             { return d.info.Flags&unix.LO_FLAGS_DIRECT_IO != 0 }

// is reports whether the device has a shape, as far as it can be seen.
func (d *Device) is(s Shape) bool { return d.readOnly == s.ReadOnly && d.sector == s.Sector }

// showsAll reports whether the device shows all of its backing.
func (d *Device) showsAll() bool { return d.info.Offset == 0 && d.info.Sizelimit == 0 }

// same reports whether a device, nil if it is not bound, is attached as it was.
func (d *Device) same(was *Device) bool {
	return d != nil && d.Tag() == was.Tag() && d.File() == was.File()
}

// isView reports whether the device is a view of ours.
func (d *Device) isView() bool {
	return d.Tag() == viewTag && d.showsAll() && d.info.Flags&unix.LO_FLAGS_READ_ONLY != 0
}

func (d *Device) String() string {
	text := d.Path()
	if backing := d.Backing(); backing != "" {
		text += " (backing " + backing
		if !d.showsAll() {
			text += fmt.Sprintf(", from byte %d", d.info.Offset)
		}
		text += ")"
	}
	return text
}

// Facts puts what is known of the device into facts.
func (d *Device) Facts(facts *state.Device) {
	facts.State = state.DeviceAttached
	if d.Detaching() {
		facts.State = state.DeviceDetaching
	}
	facts.Path, facts.Number = d.Path(), d.number
	facts.Size, facts.ReadOnly = d.bytes, d.readOnly
}

// Backing is what a loop device shows.
type Backing struct {
	File   FileID
	Offset uint64 // from where on
	// Ours: the plugin attached the device.
	Ours bool
	// Over is the block device that it shows, whatever its node was named; zero: a file.
	Over state.DeviceNumber
}

// BackingOf asks an open loop device what it shows; nil when it is not bound.
func BackingOf(f *os.File) (*Backing, error) {
	info, err := statusOf(int(f.Fd()), f.Name())
	if info == nil || err != nil {
		return nil, err
	}
	d := Device{info: *info}
	b := &Backing{File: d.File(), Offset: info.Offset, Ours: isTag(d.Tag())}
	if info.Rdevice != info.Device { // some kernels name for a file the device that it is on
		b.Over = d.over()
	}
	return b, nil
}

// BackingAt returns the name of the loop device with a number, such as "loop3", and its
// backing as sysfs names it; nothing if there is no such device, or it is not bound. It
// asks neither the device nor the disk of its backing.
func BackingAt(number state.DeviceNumber) (name, backing string) {
	link, err := os.Readlink(filepath.Join(sysNumbers, number.String()))
	if err != nil {
		return "", ""
	}
	name = filepath.Base(link)
	return name, backingOf(name)
}

// statusOf asks an open loop device, whose node is at the path, for its status; nil when it
// is not bound.
func statusOf(fd int, path string) (*unix.LoopInfo64, error) {
	info, err := unix.IoctlLoopGetStatus64(fd)
	if errors.Is(err, unix.ENXIO) {
		return nil, nil
	}
	if err != nil {
		return nil, &os.PathError{Op: "LOOP_GET_STATUS64", Path: path, Err: err}
	}
	return info, nil
}

// identify asks an open device only what it shows, and for whom: what same compares.
func identify(fd int, name string) (*Device, error) {
	info, err := statusOf(fd, "/dev/"+name)
	if info == nil || err != nil {
		return nil, err
	}
	return &Device{name: name, info: *info}, nil
}

// describe asks the kernel about an open device; nil when it is not bound.
func describe(fd int, name string) (*Device, error) {
	path := "/dev/" + name
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, &os.PathError{Op: "fstat", Path: path, Err: err}
	}
	d, err := identify(fd, name)
	if d == nil || err != nil {
		return nil, err
	}
	d.number, d.sequence = devnode.NumberOf(st.Rdev), sequenceOf(fd)
	if d.bytes, err = unix.Seek(fd, 0, io.SeekEnd); err != nil {
		return nil, fmt.Errorf("size of %s: %w", path, err)
	}
	readOnly, err := unix.IoctlGetInt(fd, unix.BLKROGET)
	if err != nil {
		return nil, &os.PathError{Op: "BLKROGET", Path: path, Err: err}
	}
	d.readOnly = readOnly != 0
	if d.sector, err = unix.IoctlGetInt(fd, unix.BLKSSZGET); err != nil {
		return nil, &os.PathError{Op: "BLKSSZGET", Path: path, Err: err}
	}
	return d, nil
}

// sequenceOf returns the unique number that an open device got when it was last attached
// or detached (BLKGETDISKSEQ, Linux 5.15); 0: none.
func sequenceOf(fd int) (n uint64) {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKGETDISKSEQ, uintptr(unsafe.Pointer(&n))); errno != 0 {
		return 0
	}
	return n
}

// still reports whether an open device is attached as it was when d was asked.
func (d *Device) still(fd int) bool { return d.sequence != 0 && sequenceOf(fd) == d.sequence }

// open opens the node of a loop device. Its number is not the one in its name where
// the driver keeps minors for partitions (max_part).
//
// os.ErrNotExist, ENXIO, ENODEV: there is no such device, or it is going away.
func open(name string, flags int) (*os.File, error) {
	number, err := numberOf(name)
	if err != nil {
		return nil, err
	}
	return devnode.Open("/dev/"+name, number, flags)
}

// numberOf returns the number of a loop device. Where these have no partitions it is the
// one in the name, which takes one system call to see.
func numberOf(name string) (state.DeviceNumber, error) {
	if index, err := strconv.ParseUint(strings.TrimPrefix(name, "loop"), 10, 32); err == nil {
		number := state.DeviceNumber{Major: loopMajor, Minor: uint32(index)}
		if link, err := os.Readlink(filepath.Join(sysNumbers, number.String())); err == nil && filepath.Base(link) == name {
			return number, nil
		}
	}
	return devnode.ReadNumber(filepath.Join(sysBlock, name, "dev"))
}

// ask opens a device for as long as it takes to describe it; nil when it is
// not bound, or being cleared (the open says ENXIO).
func ask(name string) (*Device, error) { return askFor(name, describe) }

// askFor is ask with another question.
func askFor(name string, question func(fd int, name string) (*Device, error)) (*Device, error) {
	if d := askByNode(name, "/dev/"+name, question); d != nil {
		return d, nil
	}
	f, err := open(name, os.O_RDONLY)
	switch {
	case errors.Is(err, unix.ENXIO), errors.Is(err, os.ErrNotExist), errors.Is(err, unix.ENODEV):
		return nil, nil
	case err != nil:
		return nil, err
	}
	d, err := question(int(f.Fd()), name)
	return d, errors.Join(err, f.Close())
}

// askByNode asks the device whose node is at a path, if that is a loop device which says
// itself that it has the name: then sysfs need not be asked for the number. nil: it is not
// bound, or something is not as it should be. Whatever else is there is opened for reading
// at most, and never waited for.
func askByNode(name, path string, question func(fd int, name string) (*Device, error)) *Device {
	index, err := strconv.ParseUint(strings.TrimPrefix(name, "loop"), 10, 32)
	if err != nil {
		return nil
	}
	fd, err := rawfile.OpenIn(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil
	}
	d, err := question(fd, name)
	if err = errors.Join(err, unix.Close(fd)); err != nil || d == nil || d.info.Number != uint32(index) {
		return nil
	}
	return d
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
	raw, err := rawfile.ReadAttribute(filepath.Join(sysBlock, name, "loop", "backing_file"))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return "", nil
	}
	return string(bytes.TrimSuffix(raw, []byte("\n"))), err
}

// backingOf is readBacking for humans, and for noticing that a backing has changed. It also
// returns "" when the backing cannot be read.
func backingOf(name string) string {
	backing, err := readBacking(name)
	if err != nil {
		return ""
	}
	return backing
}
