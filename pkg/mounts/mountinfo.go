package mounts

import (
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/state"
)

// mountinfoTable reads the whole of /proc/self/mountinfo for each look: 3 µs a
// mount. It serves kernels without statmount(2).
type mountinfoTable struct{}

func (mountinfoTable) mask() int { return unix.STATX_MNT_ID }

func (mountinfoTable) stack(id uint64) ([]entry, error) {
	infos, err := mounttable.Own(nil)
	if err != nil {
		return nil, err
	}
	return stackOf(infos, id)
}

// stackAt returns the mounts at a path without looking at the path itself, the
// top first; nil when it is no mount point. Of two stacks at one path, one of
// which is hidden by a mount on a directory above, it takes the later one.
func stackAt(path string) ([]entry, error) {
	infos, err := mounttable.Own(func(i *mountinfo.Info) (bool, bool) { return i.Mountpoint != path, false })
	if err != nil || len(infos) == 0 {
		return nil, err
	}
	covered := map[int]bool{}
	for _, i := range infos {
		covered[i.Parent] = true
	}
	top := infos[0]
	for _, i := range infos {
		if !covered[i.ID] {
			top = i
		}
	}
	return stackOf(infos, uint64(top.ID))
}

// stackOf walks from a mount to its parent for as long as both have the same
// mount point. ENOENT: the mount has gone, or others came while the table was
// read, with its id or another that was free again, and it leads in a circle.
func stackOf(infos []*mountinfo.Info, id uint64) ([]entry, error) {
	byID := make(map[uint64]*mountinfo.Info, len(infos))
	for _, i := range infos {
		byID[uint64(i.ID)] = i
	}
	top := byID[id]
	if top == nil {
		return nil, unix.ENOENT
	}
	var stack []entry
	for i := top; i != nil && i.Mountpoint == top.Mountpoint; i = byID[uint64(i.Parent)] {
		if len(stack) == len(byID) {
			return nil, unix.ENOENT
		}
		stack = append(stack, entryOf(i))
		if i.Parent == i.ID {
			break
		}
	}
	return stack, nil
}

func entryOf(i *mountinfo.Info) entry {
	return entry{
		id:         uint64(i.ID),
		parent:     uint64(i.Parent),
		point:      i.Mountpoint,
		root:       i.Root,
		device:     state.DeviceNumber{Major: uint32(i.Major), Minor: uint32(i.Minor)},
		fsType:     i.FSType,
		source:     i.Source,
		attributes: attributesOf(i.Options),
		readOnly:   filesystem.HasOption(i.VFSOptions, "ro"),
		options:    i.VFSOptions,
	}
}

// attributesOf reads the options of a mount as show_mnt_opts in the kernel's
// fs/proc_namespace.c writes them: strictatime is what has no word.
func attributesOf(options string) state.Attributes {
	a := state.StrictAtime
	for word := range strings.SplitSeq(options, ",") {
		switch word {
		case "ro":
			a |= state.ReadOnly
		case "nosuid":
			a |= state.NoSuid
		case "nodev":
			a |= state.NoDev
		case "noexec":
			a |= state.NoExec
		case "noatime":
			a = a&^state.AtimeMask | state.NoAtime
		case "relatime":
			a &^= state.AtimeMask
		case "nodiratime":
			a |= state.NoDirAtime
		case "nosymfollow":
			a |= state.NoSymFollow
		}
	}
	return a
}
