package mounts

import (
	"bytes"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// statmountTable asks the kernel for one mount at a time, so a look costs the
// same however many mounts there are.
type statmountTable struct {
	root uint64 // the mount that holds the root, and so is mounted at no path below it
}

func (statmountTable) mask() int { return unix.STATX_MNT_ID_UNIQUE }

func (t statmountTable) stack(id uint64) ([]entry, error) {
	top, err := statmount(id)
	if err != nil {
		return nil, err
	}
	stack := []entry{top}
	for e := top; e.parent != e.id && e.parent != t.root; {
		// An error: the parent is beyond the root of this process, or went just now.
		if e, err = statmount(e.parent); err != nil || e.point != top.point {
			break
		}
		stack = append(stack, e)
	}
	return stack, nil
}

// mountIDRequest is struct mnt_id_req of linux/mount.h, first version.
type mountIDRequest struct {
	size  uint32
	_     uint32
	id    uint64
	param uint64
}

// statmountHeader is struct statmount of linux/mount.h as far as it is used
// here. Strings are offsets from the end of the whole struct, statmountSize.
type statmountHeader struct {
	size        uint32
	options     uint32
	mask        uint64
	major       uint32
	minor       uint32
	magic       uint64
	superFlags  uint32
	fsType      uint32
	id          uint64
	parent      uint64
	oldID       uint32
	oldParent   uint32
	attributes  uint64
	propagation uint64
	peerGroup   uint64
	master      uint64
	from        uint64
	root        uint32
	point       uint32
	namespace   uint64
	subtype     uint32
	source      uint32
}

const (
	statmountSize = 512

	statmountSuper   = 0x1 // STATMOUNT_SB_BASIC
	statmountMount   = 0x2 // STATMOUNT_MNT_BASIC
	statmountRoot    = 0x8
	statmountPoint   = 0x10
	statmountType    = 0x20
	statmountOptions = 0x80  // Linux 6.11
	statmountSource  = 0x200 // Linux 6.13

	statmountAll = statmountSuper | statmountMount | statmountRoot | statmountPoint | statmountType | statmountOptions | statmountSource

	superReadOnly = 0x1 // SB_RDONLY
)

// superWords are the words of mountinfo for flags of a superblock, which are
// not among the options that statmount(2) tells (show_sb_opts in
// fs/proc_namespace.c).
var superWords = []struct {
	flag uint32
	word string
}{{0x10, "sync"}, {0x80, "dirsync"}, {0x2000000, "lazytime"}}

// statmountBuffers are of 4 KiB, and aligned for the struct.
var statmountBuffers = sync.Pool{New: func() any { return new([512]uint64) }}

// statmount returns all of a mount, with a buffer that grows until all strings fit.
func statmount(id uint64) (entry, error) {
	buffer := statmountBuffers.Get().(*[512]uint64)
	defer statmountBuffers.Put(buffer)
	for words := buffer[:]; ; {
		switch err := callStatmount(id, statmountAll, words); err {
		case nil:
			return decode(words), nil
		case unix.EOVERFLOW:
			words = make([]uint64, 2*len(words))
		default:
			return entry{}, err
		}
	}
}

// attributesNow returns the attributes of a mount, which costs a third of statmount.
func attributesNow(id uint64) (state.Attributes, error) {
	buffer := statmountBuffers.Get().(*[512]uint64)
	defer statmountBuffers.Put(buffer)
	if err := callStatmount(id, statmountMount, buffer[:]); err != nil {
		return 0, err
	}
	s := (*statmountHeader)(unsafe.Pointer(&buffer[0]))
	return state.Attributes(s.attributes) & knownAttributes, nil
}

// callStatmount calls statmount(2).
func callStatmount(id, mask uint64, words []uint64) error {
	req := mountIDRequest{size: uint32(unsafe.Sizeof(mountIDRequest{})), id: id, param: mask}
	for {
		_, _, errno := unix.Syscall6(unix.SYS_STATMOUNT, uintptr(unsafe.Pointer(&req)), uintptr(unsafe.Pointer(&words[0])), uintptr(len(words))*8, 0, 0, 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

func decode(words []uint64) entry {
	s := (*statmountHeader)(unsafe.Pointer(&words[0]))
	strs := unsafe.Slice((*byte)(unsafe.Pointer(&words[0])), len(words)*8)[statmountSize:]
	str := func(bit uint64, offset uint32) string {
		if s.mask&bit == 0 || int(offset) > len(strs) {
			return ""
		}
		text, _, _ := bytes.Cut(strs[offset:], []byte{0})
		return string(text)
	}
	return entry{
		id:         s.id,
		unique:     s.id,
		parent:     s.parent,
		point:      str(statmountPoint, s.point),
		root:       str(statmountRoot, s.root),
		device:     state.DeviceNumber{Major: s.major, Minor: s.minor},
		fsType:     str(statmountType, s.fsType),
		source:     str(statmountSource, s.source),
		attributes: state.Attributes(s.attributes) & knownAttributes,
		readOnly:   s.superFlags&superReadOnly != 0,
		options:    withFlags(str(statmountOptions, s.options), s.superFlags),
	}
}

func withFlags(options string, flags uint32) string {
	for _, f := range superWords {
		if flags&f.flag != 0 {
			options = f.word + "," + options
		}
	}
	return options
}

// knownAttributes leaves out what package state has no name for (idmapped mounts).
const knownAttributes = state.ReadOnly | state.NoSuid | state.NoDev | state.NoExec |
	state.AtimeMask | state.NoDirAtime | state.NoSymFollow
