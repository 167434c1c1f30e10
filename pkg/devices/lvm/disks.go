package lvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// disk is a disk of LVM on this node, or one that may be.
type disk struct {
	path   string
	label        // unknown if the disk is silent
	silent bool  // it does not answer
	theirs error // not nil: what is on it is a pod's, and this says why
}

// usable reports whether a disk counts as one of its group.
func (d disk) usable() bool { return !d.silent && d.theirs == nil }

// finder returns the disks of LVM on this node, and the silent ones, of which it is not
// known whether they are LVM's.
type finder func(ctx context.Context) ([]disk, error)

// errGone says that a group is not on this node.
var errGone = errors.New("there is no such volume group on this node")

// hidden is an error that lists disks which may be a group's that was not found, or that
// lacks some. No event tells when that changes.
type hidden struct {
	silent []string // they do not answer
	theirs []string // they bear the group's name, and are pods', with why
}

// hiddenDisks lists the disks that may be a group's, and do not count.
func hiddenDisks(group string, disks []disk) (h hidden) {
	for _, d := range disks {
		switch {
		case d.silent:
			h.silent = append(h.silent, d.path)
		case d.theirs != nil && d.group == group:
			h.theirs = append(h.theirs, d.theirs.Error())
		}
	}
	return h
}

func (h hidden) any() bool { return len(h.silent)+len(h.theirs) > 0 }

func (h hidden) Error() string {
	var all []string
	if len(h.silent) > 0 {
		all = append(all, "it may be on disks that do not answer: "+strings.Join(h.silent, ", "))
	}
	if len(h.theirs) > 0 {
		all = append(all, "a pod's disk does not count: "+strings.Join(h.theirs, "; "))
	}
	return strings.Join(all, "; ")
}

// membersOf returns the paths of the disks of a group, and how many are missing. known is the
// group's UUID; empty: it is not known. errGone, wrapped: there are none. FailedPrecondition:
// two groups have that name.
func membersOf(group, known string, disks []disk) (paths []string, missing int, err error) {
	var latest label
	uuid := ""
	for _, d := range disks {
		switch {
		case !d.usable(), d.group != group, known != "" && d.groupUUID != known:
		case uuid != "" && d.groupUUID != uuid:
			return nil, 0, state.Errorf(state.FailedPrecondition, "volume group %s: two groups on this node have that name, with the UUIDs %s and %s: rename one of them (vgrename)", group, uuid, d.groupUUID)
		default:
			uuid = d.groupUUID
			if d.sequence >= latest.sequence {
				latest = d.label
			}
		}
	}
	if uuid == "" {
		return nil, 0, fmt.Errorf("volume group %s: %w", group, errGone)
	}
	there := map[string]bool{}
	for _, d := range disks {
		if d.usable() && slices.Contains(latest.members, d.uuid) {
			paths, there[d.uuid] = append(paths, d.path), true
		}
	}
	slices.Sort(paths)
	return paths, len(latest.members) - len(there), nil
}

// lookLimit is how long a disk may take to answer when its label is read.
const lookLimit = 2 * time.Second

// strangers are kinds of devices that are never disks of a volume group here: what is in
// memory, has removable media, or hangs when a server is away.
var strangers = regexp.MustCompile(`^(ram|zram|sr|fd|nbd|rbd|drbd|mtdblock)[0-9]`)

var fitPath = regexp.MustCompile(`^/dev/[A-Za-z0-9/_.!-]+$`) // no character of a regular expression, but the dot

// newFinder returns a finder that reads the labels of this node's disks. A disk that does
// not answer is asked once at a time. theirs is devices.Environment.Raw.
func newFinder(theirs func(state.DeviceNumber) error) finder {
	looks := &hang.Calls[*label]{}
	return func(ctx context.Context) (found []disk, err error) {
		entries, err := os.ReadDir("/sys/class/block")
		if err != nil {
			return nil, err
		}
		for _, entry := range entries {
			path, fit := candidate(entry.Name())
			if !fit {
				continue
			}
			l, err := looks.Do(ctx, path, lookLimit, func() (*label, error) {
				if nested(entry.Name()) { // which asks a loop device
					return nil, nil
				}
				return labelAt(path)
			})
			switch {
			case ctx.Err() != nil:
				return nil, ctx.Err()
			case gone(err):
			case err != nil:
				klog.FromContext(ctx).Error(err, "Cannot read whether a disk is LVM's", "path", path)
				if !failed(err) {
					found = append(found, disk{path: path, silent: true})
				}
			case l != nil:
				found = append(found, disk{path: path, label: *l, theirs: whose(entry.Name(), theirs)})
			}
		}
		return found, nil
	}
}

// gone reports whether an error says that there is no disk.
func gone(err error) bool {
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOMEDIUM)
}

// failed reports whether an error comes from the disk itself. Any other error, of this
// process or of the path to the disk, says nothing about what the disk is.
func failed(err error) bool { return errors.Is(err, unix.EIO) }

// candidate returns the node of a device that may be a disk of LVM. It asks no device.
func candidate(name string) (path string, fit bool) {
	if strangers.MatchString(name) || empty(name) {
		return "", false
	}
	holders, err := os.ReadDir(filepath.Join("/sys/class/block", name, "holders"))
	if err != nil {
		return "", false // it is going away
	}
	for _, holder := range holders { // such as multipath or md, which shows the same bytes
		uuid, err := rawfile.Read(filepath.Join("/sys/class/block", holder.Name(), "dm/uuid"))
		isVolume := err == nil && strings.HasPrefix(string(uuid), uuidPrefix)
		if !isVolume && !passes(name, holder.Name(), err) {
			return "", false
		}
	}
	number, err := devnode.ReadNumber(filepath.Join("/sys/class/block", name, "dev"))
	if err != nil {
		return "", false
	}
	path, err = devnode.PathOf(number)
	if err != nil || !fitPath.MatchString(path) {
		return "", false
	}
	return path, true
}

// passes reports whether a holder of a device is gone, or is just being made or removed: a moment
// ago it held nothing, or soon does not, so it hides no disk. err is that of a read of dm/uuid,
// which says EINVAL, EIO or ENODEV while a device of the device mapper is removed
// (drivers/md/dm-sysfs.c). One that is made is a holder before it has that file
// (dm_setup_md_queue in drivers/md/dm.c).
func passes(name, holder string, err error) bool {
	if err != nil && (!errors.Is(err, os.ErrNotExist) || strings.HasPrefix(holder, "dm-")) {
		return true
	}
	_, gone := os.Lstat(filepath.Join("/sys/class/block", name, "holders", holder))
	return errors.Is(gone, os.ErrNotExist)
}

// empty reports whether a device has no bytes, as a loop device without a file.
func empty(name string) bool {
	size, err := rawfile.Read(filepath.Join("/sys/class/block", name, "size"))
	return err != nil || string(size) == "0\n"
}

// lineage returns a device and those that it is made of: the disk of a partition, what the
// device mapper or md puts together.
func lineage(name string) (all []string, err error) {
	dir := filepath.Join("/sys/class/block", name)
	var below []string
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		real, err := filepath.EvalSymlinks(dir)
		if err != nil {
			return nil, err
		}
		below = append(below, filepath.Base(filepath.Dir(real)))
	}
	slaves, _ := os.ReadDir(filepath.Join(dir, "slaves")) // a device that has no such directory is made of nothing
	for _, slave := range slaves {
		below = append(below, slave.Name())
	}
	all = append(all, name)
	for _, name := range below {
		more, err := lineage(name)
		if err != nil {
			return nil, err
		}
		all = append(all, more...)
	}
	return all, nil
}

// nested reports whether a device lies in a volume of the plugin's, or in any logical
// volume, or shows a block device as a loop device does: then it belongs to the user of that.
func nested(name string) bool {
	all, err := lineage(name)
	return err != nil || slices.ContainsFunc(all, isVolume)
}

// isVolume is nested for one device of the lineage.
func isVolume(name string) bool {
	dir := filepath.Join("/sys/class/block", name)
	if uuid, err := rawfile.Read(filepath.Join(dir, "dm/uuid")); err == nil && strings.HasPrefix(string(uuid), uuidPrefix) {
		return true
	}
	if layer, err := rawfile.Read(filepath.Join(dir, "dm/name")); err == nil && mapper.IsLayer(strings.TrimSpace(string(layer))) {
		return true
	}
	_, err := rawfile.Read(filepath.Join(dir, "loop/backing_file"))
	return err == nil && showsVolume(dir) // else it is no loop device, or shows nothing
}

// whose returns the first error that theirs has for a device or one that it is made of.
func whose(name string, theirs func(state.DeviceNumber) error) error {
	all, err := lineage(name)
	if err != nil {
		return err
	}
	for _, name := range all {
		number, err := devnode.ReadNumber(filepath.Join("/sys/class/block", name, "dev"))
		if err != nil {
			return err
		}
		if err := theirs(number); err != nil {
			return fmt.Errorf("/dev/%s: %w", name, err)
		}
	}
	return nil
}

// showsVolume reports whether a loop device is one that the plugin has attached, or shows a block
// device, as kubelet's do over raw volumes; or may be.
func showsVolume(dir string) bool {
	number, err := devnode.ReadNumber(filepath.Join(dir, "dev"))
	if err != nil {
		return true // it is going away
	}
	info, err := blockdev.InfoOf(number)
	return err != nil || info.Ours || info.Over != (state.DeviceNumber{})
}

// labelAt reads the label of the disk with a node.
func labelAt(path string) (l *label, err error) {
	f, err := rawfile.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	// What is in the cache of this node may be older than the disk.
	if err := unix.Fadvise(int(f.Fd()), 0, 2<<20, unix.FADV_DONTNEED); err != nil {
		return nil, &os.PathError{Op: "fadvise", Path: path, Err: err}
	}
	return readLabel(f)
}

// flush makes what lvm has written to the disks of a group durable: LVM writes past the
// page cache, and leaves it to the disk when it takes the bytes out of its own.
func flush(paths []string) (err error) {
	for _, path := range paths {
		f, openErr := rawfile.Open(path, unix.O_RDONLY|unix.O_NOFOLLOW, 0)
		if openErr != nil {
			err = errors.Join(err, openErr)
			continue
		}
		err = errors.Join(err, f.Sync(), f.Close())
	}
	return err
}
