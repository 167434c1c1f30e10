package mounts

import (
	"bufio"
	"context"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	holderLimit = 16              // no error text should name more
	holderTime  = 2 * time.Second // a stuck process can make /proc wait for it
)

// Holders names what keeps a device, as "pid 123 (bash)": processes that have a
// file, a directory or a mapping on its file system, or the device node itself;
// loop devices over a file on it, or over its node; and, as "the mount at /x" or "pid 123 (bash) with a mount at /x in its own
// mount namespace", where it is mounted.
//
// It is for error texts: at most 16 names, found within two seconds or before
// ctx ends, only processes that /proc of this PID namespace shows, and only loop
// devices whose file has a path here. What else the kernel itself holds (swap) has
// no process, and a file of a btrfs is known by its mount, so not once that is gone.
func Holders(ctx context.Context, device state.DeviceNumber) []string {
	found, _ := collect(ctx, fmt.Sprintf("holders of %s", device), func(yield func(string) bool) {
		for name := range usersOf(device) {
			if !yield(name) {
				return
			}
		}
		for name := range mounters(device) {
			if !yield(name) {
				return
			}
		}
	})
	return found
}

// Keepers names what would keep the file system on a device alive if its mounts
// at the paths were taken away, in the words of Holders and with its limits:
// processes that use its files, mounts below the paths, and mounts elsewhere, in
// other mount namespaces those that would not go along by propagation.
func (h *Host) Keepers(ctx context.Context, device state.DeviceNumber, paths []string) []string {
	going := map[string]bool{}
	for _, path := range paths {
		if rel, err := h.relative(path); err == nil {
			going[filepath.Join(h.real, rel)] = true
		}
	}
	found, complete := collect(ctx, fmt.Sprintf("keepers of %s", device), func(yield func(string) bool) {
		for name := range usersOf(device) {
			if !yield(name) {
				return
			}
		}
		for name := range stayers(device, going) {
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

// stayers yields the mounts that Keepers names.
func stayers(device state.DeviceNumber, going map[string]bool) iter.Seq[string] {
	return func(yield func(string) bool) {
		infos, err := mountinfo.GetMounts(nil)
		if err != nil {
			yield(fmt.Sprintf("mounts that cannot be seen (%v)", err))
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
		for name := range elsewhere(func(proc string) (string, bool) { return stayerIn(proc, shows, groups) }) {
			if !yield(name) {
				return
			}
		}
	}
}

// stayerIn returns where the mount namespace of a process shows a device and no
// unmount in one of the peer groups takes it away: an unmount reaches what is
// mounted on a member of the group, or on a slave of it (mount_namespaces(7)).
func stayerIn(proc string, shows mountinfo.FilterFunc, groups map[string]bool) (string, bool) {
	infos := mountsOf(proc, nil)
	parents := byID(infos)
	for _, i := range infos {
		if other, _ := shows(i); other {
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
			return i.Mountpoint, true
		}
	}
	return "", false
}

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

// searches are those for holders, which a process that is stuck can make wait, by
// what is looked for.
var searches hang.Calls[struct{}]

// collect gathers names for as long as there is time, and tells whether the search
// came to its end. What a search that does not has found until then counts.
func collect(ctx context.Context, key string, names iter.Seq[string]) (found []string, complete bool) {
	ctx, cancel := context.WithTimeout(ctx, holderTime)
	defer cancel()
	var mu sync.Mutex
	_, err := searches.Do(ctx, key, hang.NoLimit, func() (struct{}, error) {
		for name := range names {
			mu.Lock()
			if ctx.Err() == nil {
				found = append(found, name)
			}
			enough := len(found) == holderLimit
			mu.Unlock()
			if enough {
				return struct{}{}, nil
			}
			if err := ctx.Err(); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, ctx.Err()
	})
	mu.Lock()
	defer mu.Unlock()
	return slices.Clone(found), err == nil
}

// usersOf yields the processes and the loop devices that use files of the device.
func usersOf(device state.DeviceNumber) iter.Seq[string] {
	return func(yield func(string) bool) {
		for name := range openers(device) {
			if !yield(name) {
				return
			}
		}
		for name := range loopsOver(device) {
			if !yield(name) {
				return
			}
		}
	}
}

// loopsOver yields the loop devices whose backing is on the device, or is its
// node. It opens none of them: that would keep one which is being detached.
func loopsOver(device state.DeviceNumber) iter.Seq[string] {
	return func(yield func(string) bool) {
		files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
		if err != nil {
			return // only a malformed pattern has an error
		}
		own := facesIn("/proc/self", device, map[string]faces{})
		for _, file := range files {
			backing, err := os.ReadFile(file)
			if err != nil {
				continue // it was detached just now
			}
			path := strings.TrimSuffix(string(backing), "\n")
			name := filepath.Base(filepath.Dir(filepath.Dir(file)))
			if own.mayHold(path) && own.match(path) && !yield(fmt.Sprintf("the loop device /dev/%s over %s", name, path)) {
				return
			}
		}
	}
}

// mayHold reports whether a path may lead to a file on the device, or to its
// node: other paths are not walked, as they may lie on a server that is dead.
func (f faces) mayHold(path string) bool {
	return strings.HasPrefix(path, "/dev/") || slices.ContainsFunc(f.points, func(point string) bool { return strings.HasPrefix(path, strings.TrimSuffix(point, "/")+"/") })
}

// openers yields the processes that use files of the device. What cannot be
// read, mostly because a process has just ended, is passed over.
func openers(device state.DeviceNumber) iter.Seq[string] {
	return func(yield func(string) bool) {
		seen := map[string]faces{}
		for proc := range processes() {
			if opens(proc, facesIn(proc, device, seen)) && !yield(describe(proc)) {
				return
			}
		}
	}
}

// faces are the ways in which the files of a device show in one mount
// namespace: by the number of the device, or, those of a btrfs, by their mount,
// because each subvolume has a number of its own, and the maps of a process
// have yet another.
type faces struct {
	device state.DeviceNumber
	points []string                      // where the device is mounted
	mounts map[uint64]state.DeviceNumber // the number of the superblock, by the mount's id
}

// facesIn returns the faces in the mount namespace of a process; seen has those
// of the namespaces met before. What cannot be read is left out.
func facesIn(proc string, device state.DeviceNumber, seen map[string]faces) faces {
	f := faces{device: device}
	namespace, err := os.Readlink(proc + "/ns/mnt")
	if err != nil {
		return f
	}
	if known, ok := seen[namespace]; ok {
		return known
	}
	for _, i := range mountsOf(proc, showing(device, false)) {
		f.points = append(f.points, i.Mountpoint)
		if e := entryOf(i); e.device.Major == 0 && e.fsType == "btrfs" {
			if f.mounts == nil {
				f.mounts = map[uint64]state.DeviceNumber{}
			}
			f.mounts[e.id] = e.device
		}
	}
	seen[namespace] = f
	return f
}

// mounters yields the mounts of the device: all of this mount namespace, and
// one of each other that a process lives in.
func mounters(device state.DeviceNumber) iter.Seq[string] {
	return func(yield func(string) bool) {
		if infos, err := mountinfo.GetMounts(showing(device, false)); err == nil {
			for _, i := range infos {
				if !yield("the mount at " + i.Mountpoint) {
					return
				}
			}
		}
		for name := range strangers(device) {
			if !yield(name) {
				return
			}
		}
	}
}

// strangers yields a process of each other mount namespace that has the device.
func strangers(device state.DeviceNumber) iter.Seq[string] {
	return elsewhere(func(proc string) (string, bool) { return mountIn(proc, device) })
}

// elsewhere yields a process of each other mount namespace in which find finds
// a mount, and where.
func elsewhere(find func(proc string) (at string, ok bool)) iter.Seq[string] {
	return func(yield func(string) bool) {
		own, err := os.Readlink("/proc/self/ns/mnt")
		if err != nil {
			return
		}
		seen := map[string]bool{own: true}
		for proc := range processes() {
			namespace, err := os.Readlink(proc + "/ns/mnt")
			if err != nil || seen[namespace] {
				continue
			}
			seen[namespace] = true
			at, ok := find(proc)
			if ok && !yield(fmt.Sprintf("%s with a mount at %s in its own mount namespace", describe(proc), at)) {
				return
			}
		}
	}
}

// processes yields the directories in /proc of all processes.
func processes() iter.Seq[string] {
	return func(yield func(string) bool) {
		procs, err := filepath.Glob("/proc/[0-9]*")
		if err != nil {
			return // only a malformed pattern has an error
		}
		for _, proc := range procs {
			if !yield(proc) {
				return
			}
		}
	}
}

func opens(proc string, f faces) bool {
	for _, link := range []string{"cwd", "root", "exe"} {
		if f.match(proc + "/" + link) {
			return true
		}
	}
	fds, err := os.ReadDir(proc + "/fd")
	if err != nil {
		return false // the process has ended
	}
	for _, fd := range fds {
		if f.match(proc + "/fd/" + fd.Name()) {
			return true
		}
	}
	return f.mapped(proc)
}

// match reports whether a link of /proc leads to a file on the device, or to the
// node of the device. A file on a broken file system is known by its path.
func (f faces) match(link string) bool {
	st, err := again(func() (st unix.Statx_t, err error) {
		err = unix.Statx(unix.AT_FDCWD, link, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
		return st, err
	})
	if corrupt(err) {
		path, err := os.Readlink(link)
		return err == nil && slices.ContainsFunc(f.points, func(point string) bool { return path == point || strings.HasPrefix(path, point+"/") })
	}
	if err != nil {
		return false
	}
	_, mounted := f.mounts[st.Mnt_id]
	return mounted || f.device == state.DeviceNumber{Major: st.Dev_major, Minor: st.Dev_minor} ||
		fileType(st.Mode) == state.BlockDevice && f.device == state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
}

// mapped reports whether a process has a file of the device in its memory. A line
// is "address perms offset dev inode path", with dev in hexadecimal.
func (f faces) mapped(proc string) bool {
	memory, err := os.Open(proc + "/maps")
	if err != nil {
		return false
	}
	defer memory.Close()
	numbers := map[string]bool{hex(f.device): true}
	for _, n := range f.mounts {
		numbers[hex(n)] = true
	}
	for lines := bufio.NewScanner(memory); lines.Scan(); {
		if fields := strings.Fields(lines.Text()); len(fields) > 3 && numbers[fields[3]] {
			return true
		}
	}
	return false
}

func hex(n state.DeviceNumber) string { return fmt.Sprintf("%02x:%02x", n.Major, n.Minor) }

// mountIn returns where the mount namespace of a process shows the device.
func mountIn(proc string, device state.DeviceNumber) (string, bool) {
	infos := mountsOf(proc, showing(device, true))
	if len(infos) == 0 {
		return "", false
	}
	return infos[0].Mountpoint, true
}

// mountsOf returns mounts of the namespace of a process, none if it has ended.
func mountsOf(proc string, filter mountinfo.FilterFunc) []*mountinfo.Info {
	f, err := os.Open(proc + "/mountinfo")
	if err != nil {
		return nil
	}
	defer f.Close()
	infos, err := mountinfo.GetMountsFromReader(f, filter)
	if err != nil {
		return nil
	}
	return infos
}

// showing passes mounts of the device, all or the first.
func showing(device state.DeviceNumber, first bool) mountinfo.FilterFunc {
	return func(i *mountinfo.Info) (bool, bool) {
		shows := entryOf(i).mount().Device == device
		return !shows, shows && first
	}
}

// describe names a process for humans.
func describe(proc string) string {
	pid := filepath.Base(proc)
	comm, err := os.ReadFile(proc + "/comm")
	if err != nil {
		return "pid " + pid
	}
	return fmt.Sprintf("pid %s (%s)", pid, strings.TrimSpace(string(comm)))
}
