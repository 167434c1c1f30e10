package process

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/mount-utils"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// NameLimit is how many names Collect returns: no error text should have more.
	NameLimit = 16

	maxOpeners = 5 // that Openers names
)

// Mount is a mount of a file system that is on a block device.
type Mount struct {
	ID    uint64
	Point string
	// Anonymous is the number of a file system that does not have its device's
	// own, such as a btrfs; zero for others.
	Anonymous state.DeviceNumber
}

// MountsOf returns the mounts of one block device in the mount namespace of a
// process, by its directory in /proc. os.ErrProcessDone: it has ended; after another error
// they are unknown.
type MountsOf func(proc string) ([]Mount, error)

// Users yields what uses the files on a block device: processes, as
// "pid 123 (bash)", and loop devices over a file on it. mountsOf tells where the
// device is mounted. Processes that end meanwhile are passed over. One of each mount
// namespace whose mounts cannot be read is named for that: it may use what they show.
//
// A process that only has the device's node open does not keep the device mounted: Holders
// names it, Users does not.
func Users(device state.DeviceNumber, mountsOf MountsOf) iter.Seq[string] {
	return users(files{device: device}, mountsOf)
}

// Holders is Users, and also names who has the device's node open.
func Holders(device state.DeviceNumber, mountsOf MountsOf) iter.Seq[string] {
	return users(files{device: device, node: true}, mountsOf)
}

// NodeUsers is Holders for the node of a device that is bound at a path. Of loop devices over the
// node it names only those that were attached by that path: others, such as the plugin's own
// read-only view, do not keep the bind.
func NodeUsers(device state.DeviceNumber, path string, mountsOf MountsOf) iter.Seq[string] {
	return users(files{device: device, node: true, bind: path}, mountsOf)
}

func users(of files, mountsOf MountsOf) iter.Seq[string] {
	return func(yield func(string) bool) {
		seen := map[string]files{}
		for proc, namespace := range all() {
			there, err := of.in(proc, namespace, mountsOf, seen)
			if err != nil && !yield(unreadable(proc)) {
				return
			}
			if there.usedBy(proc) && !yield(shortName(proc)) {
				return
			}
		}
		namespace, _ := os.Readlink("/proc/self/ns/mnt")
		own, _ := of.in("/proc/self", namespace, mountsOf, seen) // one of those above told of an error
		for name := range loopsOver(own) {
			if !yield(name) {
				return
			}
		}
	}
}

// Openers names the processes that have the node of a block device open, for error
// texts. It looks through /proc, as far as this process may see it and until ctx ends.
func Openers(ctx context.Context, device state.DeviceNumber) string {
	var found []string
	for proc := range all() {
		if ctx.Err() != nil || len(found) == maxOpeners {
			break
		}
		if (files{device: device, node: true}).openIn(proc) {
			found = append(found, nameOf(proc))
		}
	}
	if len(found) == 0 {
		return "a process that is not visible here"
	}
	return strings.Join(found, ", ")
}

// InOtherNamespaces yields one process of each mount table of another mount namespace in which find
// finds a mount, as "pid 123 (bash) with a mount at /x in its own mount namespace", or may
// have missed one, as "pid 123 (bash) with mounts that cannot be read". The error of find is
// os.ErrProcessDone if the process has ended.
func InOtherNamespaces(find func(proc string) (at string, found bool, err error)) iter.Seq[string] {
	return func(yield func(string) bool) {
		own, err := os.Readlink("/proc/self/ns/mnt")
		if err != nil {
			yield(fmt.Sprintf("mount namespaces that cannot be seen (%v)", err))
			return
		}
		seen := map[string]bool{}
		for proc, namespace := range all() {
			if namespace == "" || namespace == own {
				continue
			}
			table := tableOf(proc, namespace)
			if seen[table] {
				continue
			}
			at, found, err := find(proc)
			if errors.Is(err, os.ErrProcessDone) {
				continue // another one tells
			}
			seen[table] = true
			if err != nil && !yield(unreadable(proc)) {
				return
			}
			if found && !yield(fmt.Sprintf("%s with a mount at %s in its own mount namespace", shortName(proc), state.Plain(at))) {
				return
			}
		}
	}
}

// unreadable names a process in whose mount namespace anything may be mounted.
func unreadable(proc string) string { return shortName(proc) + " with mounts that cannot be read" }

// searches are those of Collect. A stuck process can make one hang in /proc.
var searches hang.Calls[struct{}]

// Collect gathers at most NameLimit names, within a time or until ctx ends, and tells
// whether the search was complete. An incomplete one returns what it has found so far. A
// search that hangs is left behind, and until it ends there is no other with its key.
func Collect(ctx context.Context, within time.Duration, key string, names iter.Seq[string]) (found []string, complete bool) {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var mu sync.Mutex
	_, err := searches.Do(ctx, key, hang.NoLimit, func() (struct{}, error) {
		for name := range names {
			if err := ctx.Err(); err != nil {
				return struct{}{}, err
			}
			mu.Lock()
			found = append(found, name)
			enough := len(found) == NameLimit
			mu.Unlock()
			if enough {
				return struct{}{}, nil
			}
		}
		return struct{}{}, ctx.Err()
	})
	mu.Lock()
	defer mu.Unlock()
	return slices.Clone(found), err == nil
}

// all yields the directories in /proc of all processes, with their mount namespaces; empty: it cannot
// be seen. Of a process whose first thread has ended, which has nothing any more, it yields those of
// its threads.
func all() iter.Seq2[string, string] {
	return func(yield func(proc, namespace string) bool) {
		for _, proc := range matching("/proc/[0-9]*") {
			namespace, err := os.Readlink(proc + "/ns/mnt")
			if !errors.Is(err, os.ErrNotExist) {
				if !yield(proc, namespace) {
					return
				}
				continue
			}
			for _, thread := range matching(proc + "/task/[0-9]*") {
				namespace, _ := os.Readlink(thread + "/ns/mnt")
				if !yield(thread, namespace) {
					return
				}
			}
		}
	}
}

func matching(pattern string) []string {
	paths, _ := filepath.Glob(pattern) // only a malformed pattern has an error
	return paths
}

// tableOf tells apart the mount tables that processes of a namespace see: those have only what is
// below the root directory of the process.
func tableOf(proc, namespace string) string {
	root, err := statx(proc + "/root")
	if err != nil { // it is nobody else's, then
		return proc
	}
	return fmt.Sprint(namespace, " ", root.Mnt_id, " ", root.Dev_major, ":", root.Dev_minor, " ", root.Ino)
}

// files tells how to recognise the files of a block device in one mount namespace: by the
// number of the device, or, for a btrfs, by their mount, because each subvolume has a
// number of its own, and /proc/<pid>/maps shows yet another.
type files struct {
	device state.DeviceNumber
	node   bool   // whether the node of the device is one of them
	bind   string // where the node is bound, if loop devices are to be told by that; else those by a path in /dev
	mounts []Mount
}

// in returns the files by the mount table of a process; seen has those
// of the tables met before. Mounts that cannot be read are left out, with an error for
// the first process of the table, unless it has ended.
func (f files) in(proc, namespace string, mountsOf MountsOf, seen map[string]files) (files, error) {
	if namespace == "" {
		return f, nil
	}
	table := tableOf(proc, namespace)
	if there, known := seen[table]; known {
		return there, nil
	}
	mounts, err := mountsOf(proc)
	if errors.Is(err, os.ErrProcessDone) { // another one tells
		return f, nil
	}
	f.mounts = mounts
	seen[table] = f
	return f, err
}

// usedBy reports whether a process uses one of the files.
func (f files) usedBy(proc string) bool {
	for _, link := range []string{"cwd", "root", "exe"} {
		if f.match(proc + "/" + link) {
			return true
		}
	}
	return f.openIn(proc) || f.mappedIn(proc)
}

// openIn reports whether a process has one of the files open. One that has ended has none.
func (f files) openIn(proc string) bool {
	fds, err := os.ReadDir(proc + "/fd")
	return err == nil && slices.ContainsFunc(fds, func(fd os.DirEntry) bool { return f.match(proc + "/fd/" + fd.Name()) })
}

// match reports whether a link of /proc leads to one of the files. A file on a broken file
// system is known by its path. It asks no server of a file system: that may be dead.
func (f files) match(link string) bool {
	st, err := statx(link)
	if mount.IsCorruptedMnt(err) {
		path, err := os.Readlink(link)
		return err == nil && slices.ContainsFunc(f.mounts, func(m Mount) bool { return path == m.Point || strings.HasPrefix(path, m.Point+"/") })
	}
	if err != nil {
		return false
	}
	if slices.ContainsFunc(f.mounts, func(m Mount) bool { return m.Anonymous != state.DeviceNumber{} && m.ID == st.Mnt_id }) {
		return true
	}
	return f.device == state.DeviceNumber{Major: st.Dev_major, Minor: st.Dev_minor} ||
		f.node && st.Mode&unix.S_IFMT == unix.S_IFBLK && f.device == state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
}

func statx(link string) (st unix.Statx_t, err error) {
	err = rawfile.RetryErr(func() error {
		return unix.Statx(unix.AT_FDCWD, link, unix.AT_NO_AUTOMOUNT|unix.AT_STATX_DONT_SYNC, unix.STATX_BASIC_STATS|unix.STATX_MNT_ID, &st)
	})
	return st, err
}

// mappedIn reports whether a process has one of the files in its memory. A line
// of maps is "address perms offset dev inode path", with dev in hexadecimal.
func (f files) mappedIn(proc string) bool {
	memory, err := os.Open(proc + "/maps")
	if err != nil {
		return false
	}
	defer memory.Close()
	hex := func(n state.DeviceNumber) string { return fmt.Sprintf("%02x:%02x", n.Major, n.Minor) }
	numbers := map[string]bool{hex(f.device): true}
	for _, m := range f.mounts {
		if m.Anonymous != (state.DeviceNumber{}) {
			numbers[hex(m.Anonymous)] = true
		}
	}
	lines := bufio.NewReader(memory)
	for begins := true; ; { // a path may be of any length
		part, more, err := lines.ReadLine()
		if err != nil {
			return false
		}
		if fields := strings.Fields(string(part)); begins && len(fields) > 3 && numbers[fields[3]] {
			return true
		}
		begins = !more
	}
}

// loopsOver yields the loop devices whose backing is one of the files.
func loopsOver(f files) iter.Seq[string] {
	return func(yield func(string) bool) {
		loops, _ := devnode.Loops() // those that can be seen, as of all else
		for name, path := range loops {
			if f.mayHave(path) && f.match(path) && !yield("a loop device over it, /dev/"+name) {
				return
			}
		}
	}
}

// mayHave reports whether a path may lead to one of the files: other paths are
// not walked, as they may lie on a server that is dead.
func (f files) mayHave(path string) bool {
	node := path == f.bind || f.bind == "" && strings.HasPrefix(path, "/dev/")
	return f.node && node || slices.ContainsFunc(f.mounts, func(m Mount) bool { return strings.HasPrefix(path, strings.TrimSuffix(m.Point, "/")+"/") })
}
