// Package mounts reads what is mounted at a path from the kernel's mount table, and
// makes single changes to it: mount, bind, set attributes, unmount. It knows nothing
// of volumes or intents.
//
// A path is taken apart first. The directory that holds it is opened from the
// root that was resolved in New, without following any symbolic link, and the
// last name is only ever used relative to that directory:
//
//	/var/lib/kubelet  /  pods/1/volumes/x   /   mount
//	     root             the place's dir        name
//
// So nobody who can write below the root can send an operation elsewhere, and
// no file descriptor stays on the mount itself, which would keep it busy.
//
// Package filesystem knows the mount options of each kind of file system, and package
// process who uses a device.
//
// Read first: place.go (a path taken apart), look.go (what is at a path) and table.go
// (the two tables of the kernel). Then device.go, source.go and bind.go (mounts),
// unmount.go and remove.go (their end), holders.go (what keeps a mount), watch.go (what
// others mount and unmount).
package mounts

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Host is the mount table of the mount namespace that the process runs in,
// seen below one directory. Its methods may be called concurrently, but calls that
// change the same path must not overlap.
//
// A method that changes something may block for as long as the file system
// does, even if ctx ends: an operation under way in the kernel cannot be cancelled. A ctx
// that has ended keeps it from starting. The comments of Look, Check and Usage say how
// long they wait.
//
// Errors name the path and what was found there. One with no class of package
// state is worth another try.
type Host struct {
	root  string // as given to New, clean
	real  string // the same directory without symbolic links
	table table

	rootID    uint64 // of the mount that real was in at New; it may be given again
	rootMount uint64 // the mount that real is in, if its id is not given again (Linux 6.8)

	// The calls that may never return, by path.
	looks     hang.Calls[state.Mountpoint]
	usages    hang.Calls[mountUsage]
	spellings hang.Calls[string]
	mounting  hang.Calls[struct{}]

	mu       sync.Mutex
	watchers []*Watcher      // that are not closed; never changed in place
	disks    map[string]bool // paths at which the last look saw file systems of disks only
}

// New returns a Host for the paths below root, an absolute path of a directory;
// "/" allows every path. Symbolic links on the way to root are resolved now
// and never again; those below it are refused. A path may be written with root
// as it is given here or as it was resolved; results have it as it was resolved,
// see Spell.
//
// It needs Linux 5.12 (mount_setattr(2)) and uses statmount(2) where the kernel
// has all of it (6.13); before that every look reads /proc/self/mountinfo.
func New(root string) (*Host, error) {
	if !filepath.IsAbs(root) {
		return nil, state.Errorf(state.InvalidArgument, "the directory %q is not an absolute path", root)
	}
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		return nil, fmt.Errorf("resolve the directory that holds all mounts: %w", err)
	}
	h := &Host{root: filepath.Clean(root), real: real, disks: map[string]bool{}}
	fd, err := openat2(unix.AT_FDCWD, real, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s (openat2, Linux 5.6): %w", real, err)
	}
	defer unix.Close(fd)
	if h.table, err = chooseTable(fd); err != nil {
		return nil, err
	}
	st, err := statx(fd, "", unix.STATX_MNT_ID)
	if err != nil {
		return nil, fmt.Errorf("statx %s: %w", real, err)
	}
	h.rootID = st.Mnt_id
	if st, err := statx(fd, "", unix.STATX_MNT_ID_UNIQUE); err == nil && st.Mask&unix.STATX_MNT_ID_UNIQUE != 0 {
		h.rootMount = st.Mnt_id
	}
	return h, nil
}

// Check returns InvalidArgument for a path that no request may name: one that
// is relative, not clean, not below the root, too long for the kernel, or that
// leads over a symbolic link or ends in one. A path that does not exist passes.
// It looks at the directories on the way, never at what is mounted at the path,
// so a file system that does not answer there does not keep it waiting.
func (h *Host) Check(path string) error {
	p, err := h.open(path)
	switch {
	case missing(err):
		return nil
	case err != nil:
		return err
	}
	defer p.close()
	fd, err := openat2(p.dir, p.name, unix.O_PATH, unix.RESOLVE_NO_XDEV)
	switch {
	case missing(err), errors.Is(err, unix.EXDEV): // a mount point is no symbolic link
		return nil
	case err == unix.ELOOP:
		return refuseLink(path)
	case err != nil:
		return fmt.Errorf("open %s: %w", path, err)
	}
	return unix.Close(fd)
}

// Holds reports whether a path is below the root, as paths in requests must be.
func (h *Host) Holds(path string) bool {
	_, err := h.relative(path)
	return err == nil
}

// relative returns the part of path below the root, or InvalidArgument.
func (h *Host) relative(path string) (string, error) {
	switch {
	case !filepath.IsAbs(path) || filepath.Clean(path) != path:
		return "", state.Errorf(state.InvalidArgument, "the path %q is not absolute and clean", path)
	case strings.ContainsRune(path, 0):
		return "", state.Errorf(state.InvalidArgument, "the path %q holds a NUL", path)
	case len(path) >= unix.PathMax:
		return "", state.Errorf(state.InvalidArgument, "the path %.64q… has %d bytes, more than PATH_MAX (%d)", path, len(path), unix.PathMax-1)
	}
	for name := range strings.SplitSeq(path, "/") {
		if len(name) > nameMax {
			return "", state.Errorf(state.InvalidArgument, "the path %q has a name of %d bytes, more than NAME_MAX (%d)", path, len(name), nameMax)
		}
	}
	for _, root := range []string{h.root, h.real} {
		rel, below := strings.CutPrefix(path, strings.TrimSuffix(root, "/")+"/")
		if below && rel != "" {
			return rel, nil
		}
	}
	return "", state.Errorf(state.InvalidArgument, "the path %q is not below %s, where all mounts belong", path, h.root)
}

const nameMax = 255 // NAME_MAX of limits.h

// answered turns a hang.Unanswered into an error that says that the file system does
// not answer.
func answered[T any](value T, err error) (T, error) {
	late, is := err.(*hang.Unanswered)
	switch {
	case !is:
		return value, err
	case late.Earlier:
		return value, fmt.Errorf("the file system has not answered an earlier look: %w", late.Unwrap())
	}
	return value, fmt.Errorf("the file system does not answer: %w", late.Unwrap())
}
