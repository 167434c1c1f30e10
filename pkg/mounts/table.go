package mounts

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// table finds a mount by the id that statx(2) tells. There are two, chosen once.
type table interface {
	// mask is what statx(2) must be asked for to tell the ids of this table.
	mask() int
	// stack returns the mount with the id and those that it covers at the same
	// mount point, the top first. ENOENT: the mount has gone.
	stack(id uint64) ([]entry, error)
}

// entry is one mount as a table has it.
type entry struct {
	id, parent uint64
	point      string // the mount point
	root       string
	device     state.DeviceNumber // of the superblock
	fsType     string
	source     string
	attributes state.Attributes
	readOnly   bool   // the superblock
	options    string // of the superblock, separated by commas
}

// chooseTable returns statmount(2) if the kernel tells all by it that is needed,
// else mountinfo. fd is of any directory.
func chooseTable(fd int) (table, error) {
	st, err := statx(fd, "", unix.STATX_MNT_ID_UNIQUE)
	switch {
	case err != nil:
		return nil, fmt.Errorf("statx: %w", err)
	case st.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return nil, state.Errorf(state.FailedPrecondition, "the kernel does not tell which paths are mount points (STATX_ATTR_MOUNT_ROOT): it is older than Linux 5.12")
	case st.Mask&unix.STATX_MNT_ID_UNIQUE == 0:
		return mountinfoTable{}, nil
	}
	// Linux 6.8 has the call, and 6.13 the source. An error means that there is
	// no such call, or that it is forbidden here.
	if e, err := statmount(st.Mnt_id); err != nil || e.source == "" {
		return mountinfoTable{}, nil
	}
	return statmountTable{}, nil
}

// mount returns what an entry says. Since Linux 6.15 an ext4 that has met an
// error refuses writes without setting the flag of the superblock, and tells
// so among its options only (ext4_show_options).
func (e entry) mount() state.Mount {
	m := state.Mount{
		Device:        e.device,
		FSType:        e.fsType,
		Source:        e.source,
		Root:          e.root,
		Attributes:    e.attributes,
		Options:       e.options,
		SuperReadOnly: e.readOnly || hasWord(e.options, "emergency_ro"),
		Corrupt:       hasWord(e.options, "shutdown"),
	}
	switch {
	case e.fsType == "devtmpfs" && e.root != "/":
		if number, ok := blockNumber("/dev" + e.root); ok {
			m.Node, m.Device = true, number
		}
	case e.fsType == "btrfs": // its number is its own
		if number, ok := blockNumber(e.source); ok {
			m.Device = number
		}
	}
	return m
}

// blockNumber returns the number of a block device node.
func blockNumber(path string) (state.DeviceNumber, bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return state.DeviceNumber{}, false
	}
	return state.DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}, true
}
