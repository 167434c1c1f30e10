package mounts

import (
	"fmt"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// table finds a mount by the id that statx(2) returns. There are two implementations;
// chooseTable chooses once.
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
	unique     uint64 // id, if it is never given again, else 0
	point      string // the mount point
	root       string
	device     state.DeviceNumber // of the superblock
	fsType     string
	source     string
	attributes state.Attributes
	readOnly   bool   // the superblock
	options    string // of the superblock, separated by commas
}

// chooseTable returns statmount(2) if the kernel's version of it tells everything that
// is needed, else mountinfo. fd is of the root.
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
	return statmountTable{st.Mnt_id}, nil
}

// mount returns an entry as a state.Mount. The source of a mount says what device it is of
// only for the kinds that HasOwnNumber: of any other, such as a tmpfs, it may be any word,
// and a mount that is taken for the volume's is unmounted, or bound for a pod.
// blockdev.MountedAt, which asks whether anybody may use a device, believes all sources.
func (e entry) mount() state.Mount {
	m := state.Mount{
		Device:        e.device,
		FSType:        e.fsType,
		Source:        e.source,
		Root:          e.root,
		Attributes:    e.attributes,
		Options:       e.options,
		SuperReadOnly: e.readOnly || filesystem.ShowsEmergency(e.options),
		Corrupt:       filesystem.ShowsShutdown(e.options),
		ID:            e.unique,
	}
	switch {
	case e.fsType == "devtmpfs" && e.root != "/":
		if number, ok := devnode.NumberAt("/dev" + e.root); ok {
			m.Node, m.Device = true, number
		}
	case filesystem.HasOwnNumber(e.fsType):
		if number, ok := devnode.NumberAt(e.source); ok {
			m.Device = number
		} else if strings.HasPrefix(e.source, "/dev/") {
			m.Pulled = true
		}
	}
	return m
}

// nodes returns the numbers of the block device node that a mount may be of: a
// node in a devtmpfs, or in the tmpfs that a container has for /dev. What covers
// the mount point is asked instead of the node, so that counts beside the name.
func (e entry) nodes() (numbers [2]state.DeviceNumber) {
	if e.root == "/" || e.fsType != "devtmpfs" && e.fsType != "tmpfs" {
		return numbers
	}
	numbers[0] = cachedNumber(e.point)
	if name := strings.TrimSuffix(e.root, "//deleted"); e.fsType == "devtmpfs" {
		if number := diskNumber(filepath.Base(name)); number != numbers[0] {
			numbers[1] = number
		}
	}
	return numbers
}

// cachedTries bounds how often a walk that met a change of the tree begins anew.
const cachedTries = 8

// cachedNumber returns the number of the block device node at a mount point, zero
// if there is none. The walk to the directory above asks no file system that might
// not answer, because the kernel has in memory what leads to a mount point; and the
// mount itself is kept busy no longer than statx(2) takes.
func cachedNumber(point string) (number state.DeviceNumber) {
	for range cachedTries {
		dir, err := openat2(unix.AT_FDCWD, filepath.Dir(point), unix.O_PATH|unix.O_DIRECTORY, rawfile.ResolveCached)
		if err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return number
		}
		st, err := statx(dir, filepath.Base(point), 0)
		unix.Close(dir)
		if err == nil && fileType(st.Mode) == state.BlockDevice {
			number = state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
		}
		return number
	}
	return number
}

// diskNumber returns the number of a disk by its name, zero if there is none.
func diskNumber(name string) state.DeviceNumber {
	number, err := devnode.ReadNumber(filepath.Join("/sys/class/block", name, "dev"))
	if err != nil {
		return state.DeviceNumber{}
	}
	return number
}
