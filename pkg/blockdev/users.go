package blockdev

import (
	"context"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

// Users names who uses a device, for error texts, as far as that can be seen: mounts of it
// and of its partitions, devices that are built on it, and the node's swap; if there are
// none, the processes that have it open. It takes at most two seconds.
func (i Info) Users(ctx context.Context) string {
	var words []string
	for _, place := range MountedAt(i.Number, i.Path) {
		words = append(words, "it is mounted at "+place)
	}
	for _, holder := range i.Holders {
		text := "/dev/" + holder + " is made of it"
		if name, _ := mapper.Named(holder); name != "" {
			text += " (/dev/mapper/" + name + ")"
		}
		words = append(words, text)
	}
	if swaps, err := os.ReadFile("/proc/swaps"); err == nil {
		for line := range strings.Lines(string(swaps)) {
			if path, _, _ := strings.Cut(line, " "); path == i.Path {
				words = append(words, "the node swaps to it")
			}
		}
	}
	for _, name := range i.Partitions {
		if part, err := Look("/dev/" + name); err == nil {
			for _, place := range MountedAt(part.Number, part.Path) {
				words = append(words, "its partition "+name+" is mounted at "+place)
			}
		}
	}
	if len(words) == 0 {
		return "it is mounted in another mount namespace, or open in " + process.Openers(ctx, i.Number)
	}
	return strings.Join(words, ", ")
}

// TakesCommands reports whether who has a device open can send it commands that its read-only
// mode does not stop (SG_IO, NVMe passthrough): a whole disk of a driver, or what the device
// mapper makes of such disks. The kernel refuses those of partitions.
func (i Info) TakesCommands() bool {
	_, err := os.Lstat("/sys/class/block/" + i.Name + "/device")
	return i.Partition == 0 && (err == nil || i.Identities[DMUUID] != "")
}

// Loops returns the nodes of the loop devices that show a device, which do not claim it. With an
// error there may be more.
func (i Info) Loops() (paths []string, err error) {
	paths, _, err = i.loops(func(state.DeviceNumber) bool { return false })
	return paths, err
}

// LoopsOnDisk returns Loops, and the nodes of the loop devices that show a partition of the device, or
// the disk that it is a partition of.
func (i Info) LoopsOnDisk() (paths, ofParts []string, err error) {
	return i.loops(func(shown state.DeviceNumber) bool {
		other, err := InfoBySysfs(shown)
		return err == nil && i.SharesDisk(other)
	})
}

// loops returns Loops, and the nodes of the loop devices over other devices that are of the same disk.
func (i Info) loops(ofDisk func(shown state.DeviceNumber) bool) (paths, ofParts []string, err error) {
	loops, err := devnode.Loops()
	if err != nil {
		err = fmt.Errorf("see which loop devices show %s: %w", i.Path, err)
	}
	for _, name := range slices.Sorted(maps.Keys(loops)) {
		backing := strings.TrimSuffix(loops[name], " (deleted)") // a node that was made again since
		switch at, ok := nodeAt(backing); {
		case backing == i.Path, ok && at == i.Number:
			paths = append(paths, "/dev/"+name)
		case ok && ofDisk(at):
			ofParts = append(ofParts, "/dev/"+name)
		}
	}
	return paths, ofParts, err
}

// nodeAt returns the number of the device node that a loop device was attached by. No path outside
// /dev is asked for: its file system might not answer.
func nodeAt(backing string) (state.DeviceNumber, bool) {
	if !strings.HasPrefix(backing, "/dev/") {
		return state.DeviceNumber{}, false
	}
	return devnode.NumberAt(backing)
}

// maxLoops is how many loop devices one over the other are followed.
const maxLoops = 8

// IsLoopOver reports whether a device is a loop device, or a partition of one, that shows another
// one, or a partition of it, or the disk that it is a partition of; be it by further loop devices.
func (i Info) IsLoopOver(other Info) bool {
	for range maxLoops {
		if i.Over == (state.DeviceNumber{}) || i.Over == other.Number {
			break
		}
		shown, err := InfoOf(i.Over)
		if err != nil || shown.SharesDisk(other) {
			return err == nil
		}
		i = shown
	}
	return i.Over == other.Number
}

// SharesDisk reports whether one of two devices is a partition of the other, be it of the same disk by
// another path.
func (i Info) SharesDisk(other Info) bool {
	part, whole := i, other
	if part.Partition == 0 {
		part, whole = other, i
	}
	if part.Partition == 0 || whole.Partition != 0 {
		return false
	}
	kind, value, _ := strings.Cut(whole.Identity(), ":")
	return part.Disk == whole.Disk || value != "" && strings.HasPrefix(part.Identities[IdentityKind(kind)], value+"-part")
}

// MountedAt returns where a device is mounted in this mount namespace. It may be gone,
// and its node with it.
func MountedAt(number state.DeviceNumber, path string) (places []string) {
	mounts, err := mounttable.Own(func(m *mountinfo.Info) (skip, stop bool) { return !shows(m, number, path), false })
	if err != nil {
		return nil // then the error text lacks the paths
	}
	for _, m := range mounts {
		places = append(places, m.Mountpoint)
	}
	slices.Sort(places)
	return places
}

// shows reports whether a mount may be of the device with the number and the node. A file
// system with a number of its own, such as btrfs, is known by the node that it was
// mounted from. It may be of any kind, because it need not be the plugin's: a mount too
// many refuses a device, and a mount too few would give away one in use. Which mounts are
// the plugin's own is for package mounts, which believes the source only of the kinds that
// the plugin makes. No source outside /dev is asked for: its file system might not answer.
func shows(m *mountinfo.Info, number state.DeviceNumber, path string) bool {
	if m.Major != 0 {
		return m.Major == int(number.Major) && m.Minor == int(number.Minor)
	}
	if !strings.HasPrefix(m.Source, "/dev/") {
		return false
	}
	if at, ok := devnode.NumberAt(m.Source); ok {
		return at == number
	}
	return m.Source == path // no other disk has the name as long as it is mounted
}
