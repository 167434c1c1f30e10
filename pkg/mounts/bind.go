package mounts

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

// BindMount shows at target what is mounted at source, which must be the whole
// of the file system on device. The flags' attributes are set before the mount
// can be reached, so a read-only bind is never writable; flags.Super are left
// alone, they belong to the superblock.
//
// It makes the directory target if it is missing, but none above it, and
// removes it again if it then fails. FailedPrecondition: source does not show
// the device, the directory above target is missing, or target is a mount
// point already. It may block if either file system does not answer.
func (h *Host) BindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags) error {
	return h.bindMount(ctx, source, device, target, flags, create)
}

// BindDevice shows the node of a device at target, a file that it makes if it
// is missing; the rules are those of BindMount. The node at device.Path must be
// that of device.Number.
func (h *Host) BindDevice(ctx context.Context, device state.Device, target string) error {
	return h.bindDevice(ctx, device, target, create)
}

func (h *Host) bindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags, mode createMode) (err error) {
	defer state.Wrap(&err, "bind %s at %s", source, target)
	p, err := h.beginBind(ctx, target)
	if err != nil {
		return err
	}
	defer p.close()
	fd, err := h.openMounted(source, device)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := h.bind(p, fd, flags, state.Directory, mode); err != nil {
		return err
	}
	h.setDisk(target, h.showedDisk(source))
	return nil
}

func (h *Host) bindDevice(ctx context.Context, device state.Device, target string, mode createMode) (err error) {
	defer state.Wrap(&err, "bind %s at %s", device.Path, target)
	p, err := h.beginBind(ctx, target)
	if err != nil {
		return err
	}
	defer p.close()
	fd, err := openNode(device)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return h.bind(p, fd, state.Flags{}, state.RegularFile, mode)
}

// beginBind opens the place of a target, above which nothing is ever made.
func (h *Host) beginBind(ctx context.Context, target string) (*place, error) {
	p, err := h.begin(ctx, target)
	if missing(err) {
		return nil, state.Errorf(state.FailedPrecondition, "the directory above the target is missing, and it is for the caller to make: %v", err)
	}
	return p, err
}

// openMounted opens (O_PATH) the root of the top mount at a path, after it has
// made sure that this is the whole file system on the device.
func (h *Host) openMounted(path string, device state.DeviceNumber) (int, error) {
	notMounted := func(found string) error {
		return state.Errorf(state.FailedPrecondition, "%s is not mounted with the volume's device %s: %s", path, device, found)
	}
	fd, err := h.openWhole(path, unix.O_PATH, 0)
	if missing(err) {
		return -1, notMounted(err.Error())
	} else if err != nil {
		return -1, err
	}
	if err := h.verifyRoot(fd, device, notMounted); err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

func (h *Host) verifyRoot(fd int, device state.DeviceNumber, notMounted func(found string) error) error {
	st, err := statx(fd, "", h.table.mask())
	switch {
	case err != nil:
		return fmt.Errorf("statx of the source: %w", err)
	case st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return notMounted("it is no mount point")
	}
	stack, err := h.table.stack(st.Mnt_id)
	if err != nil {
		return fmt.Errorf("mount id %d of the source: %w", st.Mnt_id, err)
	}
	if m := stack[0].mount(); m.Node || !m.Is(device) {
		return notMounted(fmt.Sprintf("it shows %q of %s, device %s", m.Root, m.Source, m.Device))
	}
	return nil
}

// openNode opens (O_PATH) the node of a device.
func openNode(device state.Device) (int, error) {
	fd, err := unix.Open(device.Path, unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open the device node: %w", err)
	}
	st, err := statx(fd, "", 0)
	number := state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
	switch {
	case err != nil:
		err = fmt.Errorf("statx of the device node: %w", err)
	case fileType(st.Mode) != state.BlockDevice:
		err = fmt.Errorf("the device node is %s: it should be device %s", fileType(st.Mode), device.Number)
	case number != device.Number:
		err = fmt.Errorf("the device node is that of device %s now, not %s", number, device.Number)
	default:
		return fd, nil
	}
	unix.Close(fd)
	return -1, err
}

// bind clones the one mount that fd is on, from fd downwards, sets the
// attributes while nobody can reach the clone, and attaches it.
//
// The clone of a shared mount would belong to its peer group: what anybody
// mounts on a bound device node would then appear on the node in /dev, and what
// a pod mounts in its volume would appear in the stage, and keep it busy. So it
// is made private; where it is attached below a shared mount the kernel makes a
// group of its own of it.
func (h *Host) bind(p *place, fd int, flags state.Flags, kind state.FileType, mode createMode) error {
	tree, err := unix.OpenTree(fd, "", unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_EMPTY_PATH)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(tree)
	if err := setAttributes(tree, "", flags, unix.MS_PRIVATE); err != nil {
		return fmt.Errorf("set the attributes %q: %w", flags.Set, err)
	}
	return h.attach(p, tree, kind, mode)
}

// BoundAt returns the paths at which the node of a device is bound in this
// mount namespace, in order: nobody else knows, for a node that is not open
// claims nothing. If there is none, it names processes with such a bind in
// another mount namespace, in the words of Holders. It reads whole mount tables.
func (h *Host) BoundAt(ctx context.Context, device state.DeviceNumber) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	infos, err := mounttable.Own(func(i *mountinfo.Info) (bool, bool) {
		return !bindsNode(i), false
	})
	if err != nil {
		return nil, fmt.Errorf("where device %s is bound: %w", device, err)
	}
	var paths []string
	for _, i := range infos {
		number, ok := devnode.NumberAt(i.Mountpoint)
		if i.FSType == "devtmpfs" && (!ok || number != device) { // something may lie over it
			number = diskNumber(filepath.Base(strings.TrimSuffix(i.Root, "//deleted")))
		}
		if number == device {
			paths = append(paths, i.Mountpoint)
		}
	}
	slices.Sort(paths)
	if len(paths) == 0 {
		var complete bool
		paths, complete = process.Collect(ctx, keepersTime, fmt.Sprintf("binds of %s", device), inOtherNamespaces(device))
		if !complete && len(paths) == 0 {
			return nil, fmt.Errorf("where device %s is bound: not all mount namespaces could be looked at in time", device)
		}
	}
	return slices.Compact(paths), nil
}

// ShownAt returns, for each block device, the paths in this mount namespace at
// which its file system is mounted or its node bound, in order. It reads the
// whole mount table.
func (h *Host) ShownAt(ctx context.Context) (map[state.DeviceNumber][]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	infos, err := mounttable.Own(nil)
	if err != nil {
		return nil, fmt.Errorf("where devices are mounted: %w", err)
	}
	shown := map[state.DeviceNumber][]string{}
	for _, i := range infos {
		m := entryOf(i).mount()
		number := m.Device
		switch {
		case bindsNode(i):
			var ok bool
			if number, ok = devnode.NumberAt(i.Mountpoint); !ok {
				continue
			}
		case m.Root != "/": // a part of it, as kubelet binds for a subPath
			continue
		}
		if number.Major != 0 && !slices.Contains(shown[number], i.Mountpoint) {
			shown[number] = append(shown[number], i.Mountpoint)
		}
	}
	for _, paths := range shown {
		slices.Sort(paths)
	}
	return shown, nil
}

// Elsewhere returns the first mount in this mount namespace of the file system on a device,
// or of a part of it; nil when there is none. It reads the whole mount table.
func (h *Host) Elsewhere(ctx context.Context, device state.DeviceNumber) (*state.Sighting, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	infos, err := mounttable.Own(nil)
	if err != nil {
		return nil, fmt.Errorf("where device %s is mounted: %w", device, err)
	}
	for _, i := range infos {
		if m := entryOf(i).mount(); m.Device == device && !bindsNode(i) {
			return &state.Sighting{Path: i.Mountpoint, Mount: m}, nil
		}
	}
	return nil, nil
}

// MountedAt returns the paths below the root, in order, at which the whole file system on a
// device is mounted in this mount namespace, be it covered. It reads the whole mount table.
func (h *Host) MountedAt(ctx context.Context, device state.DeviceNumber) ([]string, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	infos, err := mounttable.Own(nil)
	if err != nil {
		return nil, fmt.Errorf("where device %s is mounted: %w", device, err)
	}
	var paths []string
	for _, i := range infos {
		if m := entryOf(i).mount(); m.Device == device && m.Root == "/" && !bindsNode(i) && state.Within(i.Mountpoint, strings.TrimSuffix(h.real, "/")) {
			paths = append(paths, i.Mountpoint)
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths), nil
}

// bindsNode reports whether a mount may be a bound device node.
func bindsNode(i *mountinfo.Info) bool {
	return i.Root != "/" && (i.FSType == "devtmpfs" || i.FSType == "tmpfs")
}
