package mounts

import (
	"context"
	"fmt"
	"iter"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

// A stuck process can make a search in /proc wait for it, and so can a busy node: thousands
// of processes, each with its files and mounts.
const (
	namesTime   = 2 * time.Second  // of one whose names are for a person
	keepersTime = 20 * time.Second // of one that must end before a broken file system is mounted anew, or a raw device detached
)

// Holders names what keeps a device, as "pid 123 (bash)": processes that have a
// file, a directory or a mapping on its file system, or the device node itself;
// loop devices over a file on it, or over its node; and, as "the mount at /x" or
// "pid 123 (bash) with a mount at /x in its own mount namespace", where it is mounted; "pid
// 123 (bash) with mounts that cannot be read" may be a holder.
//
// It is for error texts: at most 16 names, found within two seconds or before
// ctx ends, only processes that /proc of this PID namespace shows, and only loop
// devices whose file has a path here. What else the kernel itself holds (swap) has
// no process, and a file of a btrfs is known by its mount, so not once that is gone.
func Holders(ctx context.Context, device state.DeviceNumber) []string {
	found, _ := process.Collect(ctx, namesTime, fmt.Sprintf("holders of %s", device), func(yield func(string) bool) {
		for name := range process.Holders(device, mountsOn(device)) {
			if !yield(name) {
				return
			}
		}
		for name := range mountsShowing(device) {
			if !yield(name) {
				return
			}
		}
	})
	return found
}

// Keepers names what would keep the file system on a device alive if its mounts
// at the paths were taken away, in the words of Holders and with its limits, but within
// twenty seconds: processes that use its files, mounts below the paths, and mounts
// elsewhere, in other mount namespaces those that would not go along by propagation.
func (h *Host) Keepers(ctx context.Context, device state.DeviceNumber, paths []string) []string {
	going := map[string]bool{}
	for _, path := range paths {
		if rel, err := h.relative(path); err == nil {
			going[filepath.Join(h.real, rel)] = true
		}
	}
	found, complete := process.Collect(ctx, keepersTime, fmt.Sprintf("keepers of %s", device), func(yield func(string) bool) {
		for name := range process.Users(device, mountsOn(device)) {
			if !yield(name) {
				return
			}
		}
		for name := range remainingMounts(device, going) {
			if !yield(name) {
				return
			}
		}
	})
	if !complete {
		found = append(found, "what could not be looked at in time")
	}
	return found
}

// remainingMounts yields the mounts that Keepers names.
func remainingMounts(device state.DeviceNumber, going map[string]bool) iter.Seq[string] {
	return func(yield func(string) bool) {
		infos, err := mounttable.Own(nil)
		if err != nil {
			yield(unseen(err))
			return
		}
		shows := showing(device, false)
		parents, groups := byID(infos), map[string]bool{}
		for _, i := range infos {
			switch other, _ := shows(i); {
			case !other && going[i.Mountpoint]:
				if parent := parents[i.Parent]; parent != nil {
					for group := range peerGroups(parent, "shared:") {
						groups[group] = true
					}
				}
			case !other, belowAny(i.Mountpoint, going):
				if !yield("the mount at " + i.Mountpoint) {
					return
				}
			}
		}
		for name := range process.InOtherNamespaces(func(proc string) (string, bool, error) { return remainingMountIn(proc, shows, groups) }) {
			if !yield(name) {
				return
			}
		}
	}
}

// remainingMountIn returns where the mount namespace of a process shows a device and no
// unmount in one of the peer groups takes it away: an unmount reaches what is
// mounted on a member of the group, or on a slave of it (mount_namespaces(7)).
func remainingMountIn(proc string, shows mountinfo.FilterFunc, groups map[string]bool) (string, bool, error) {
	infos, err := mounttable.Of(proc, func(i *mountinfo.Info) (skip, stop bool) {
		if other, _ := shows(i); other { // perhaps a parent; the paths in a pod's table can take gigabytes
			*i = mountinfo.Info{ID: i.ID, Optional: strings.Clone(i.Optional)}
		}
		return false, false
	})
	if err != nil {
		return "", false, err
	}
	parents := byID(infos)
	for _, i := range infos {
		if i.Mountpoint == "" { // it shows something else
			continue
		}
		goes := false
		if parent := parents[i.Parent]; parent != nil {
			for _, kind := range []string{"shared:", "master:"} {
				for group := range peerGroups(parent, kind) {
					goes = goes || groups[group]
				}
			}
		}
		if !goes {
			return i.Mountpoint, true, nil
		}
	}
	return "", false, nil
}

// unseen tells that mounts of this mount namespace may be missing.
func unseen(err error) string { return fmt.Sprintf("mounts that cannot be seen (%v)", err) }

func byID(infos []*mountinfo.Info) map[int]*mountinfo.Info {
	all := make(map[int]*mountinfo.Info, len(infos))
	for _, i := range infos {
		all[i.ID] = i
	}
	return all
}

// peerGroups yields the groups that a mount is in, by a word of its optional fields.
func peerGroups(i *mountinfo.Info, kind string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for word := range strings.FieldsSeq(i.Optional) {
			if group, ok := strings.CutPrefix(word, kind); ok && !yield(group) {
				return
			}
		}
	}
}

func belowAny(path string, dirs map[string]bool) bool {
	for dir := range dirs {
		if strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

// mountsOn tells where the device is mounted in the namespace of a process.
func mountsOn(device state.DeviceNumber) process.MountsOf {
	return func(proc string) (all []process.Mount, err error) {
		infos, err := mounttable.Of(proc, showing(device, false))
		for _, i := range infos {
			e := entryOf(i)
			m := process.Mount{ID: e.id, Point: e.point}
			if e.device.Major == 0 && filesystem.HasOwnNumber(e.fsType) {
				m.Anonymous = e.device
			}
			all = append(all, m)
		}
		return all, err
	}
}

// mountsShowing yields the mounts of the device: all of this mount namespace, and
// one of each other that a process lives in.
func mountsShowing(device state.DeviceNumber) iter.Seq[string] {
	return func(yield func(string) bool) {
		infos, err := mounttable.Own(showing(device, false))
		if err != nil && !yield(unseen(err)) {
			return
		}
		for _, i := range infos {
			if !yield("the mount at " + i.Mountpoint) {
				return
			}
		}
		for name := range inOtherNamespaces(device) {
			if !yield(name) {
				return
			}
		}
	}
}

// inOtherNamespaces yields a process of each other mount namespace that has the device.
func inOtherNamespaces(device state.DeviceNumber) iter.Seq[string] {
	return process.InOtherNamespaces(func(proc string) (string, bool, error) { return mountIn(proc, device) })
}

// mountIn returns where the mount namespace of a process shows the device.
func mountIn(proc string, device state.DeviceNumber) (string, bool, error) {
	infos, err := mounttable.Of(proc, showing(device, true))
	if err != nil || len(infos) == 0 {
		return "", false, err
	}
	return infos[0].Mountpoint, true, nil
}

// showing passes mounts of the device, all or the first.
func showing(device state.DeviceNumber, first bool) mountinfo.FilterFunc {
	return func(i *mountinfo.Info) (bool, bool) {
		shows := entryOf(i).mount().Device == device
		return !shows, shows && first
	}
}
