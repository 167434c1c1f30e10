package mounts

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// place is a path taken apart: an open directory and a name in it.
type place struct {
	path string // as in the request, for messages
	real string // without symbolic links, as the mount table has it
	dir  int    // O_PATH
	name string
}

// begin opens the place of an operation that changes something.
func (h *Host) begin(ctx context.Context, path string) (*place, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return h.open(path)
}

// open returns the place of a path that may exist or not. missing holds for its
// error if a directory on the way does not exist or is a file.
func (h *Host) open(path string) (*place, error) { return h.openResolving(path, 0) }

// openResolving is open with more rules of how the directory is resolved (openat2(2)).
func (h *Host) openResolving(path string, resolve uint64) (*place, error) {
	rel, err := h.relative(path)
	if err != nil {
		return nil, err
	}
	parent, name := filepath.Split(rel)
	dir, err := openat2(unix.AT_FDCWD, filepath.Join(h.real, parent), unix.O_PATH|unix.O_DIRECTORY, resolve)
	if err == unix.EAGAIN {
		return nil, err
	}
	if err != nil {
		return nil, h.whyNot(filepath.Dir(path), rel, err)
	}
	return &place{path: path, real: filepath.Join(h.real, rel), dir: dir, name: name}, nil
}

// openWhole opens a path at once, with what is mounted there.
func (h *Host) openWhole(path string, flags int, resolve uint64) (int, error) {
	rel, err := h.relative(path)
	if err != nil {
		return -1, err
	}
	fd, err := openat2(unix.AT_FDCWD, filepath.Join(h.real, rel), flags, resolve)
	if err != nil && err != unix.EAGAIN {
		err = h.whyNot(path, rel, err)
	}
	return fd, err
}

// whyNot explains why a path, or its directory, cannot be opened.
func (h *Host) whyNot(path, rel string, cause error) error {
	root, err := openat2(unix.AT_FDCWD, h.real, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		// Not %w: a missing root does not mean that the path below it is missing.
		return state.Errorf(state.Unavailable, "open %s, which was there at start: %v", h.real, err)
	}
	defer unix.Close(root)
	if cause == unix.ELOOP {
		return refuseLink(filepath.Join(h.root, firstLink(root, rel)))
	}
	return fmt.Errorf("open %s: %w", path, cause)
}

// openFor opens the place of a mount.
func (h *Host) openFor(path string, mode createMode) (*place, error) {
	if mode == create {
		return h.openCreating(path)
	}
	return h.open(path)
}

// openCreating is open, but creates the directories that are missing on the way.
func (h *Host) openCreating(path string) (*place, error) {
	p, err := h.open(path)
	if !errors.Is(err, unix.ENOENT) {
		return p, err
	}
	parent, err := h.openCreating(filepath.Dir(path))
	if err != nil {
		return nil, err
	}
	defer parent.close()
	if _, err := parent.make(state.Directory); err != nil {
		return nil, err
	}
	return h.open(path)
}

// close never fails: nothing is written through an O_PATH descriptor.
func (p *place) close() { unix.Close(p.dir) }

// proc returns a path of the place for system calls that take nothing else. It
// holds for as long as p is open.
func (p *place) proc() string {
	return "/proc/self/fd/" + strconv.Itoa(p.dir) + "/" + p.name
}

// make creates an empty directory (0750) or file (0640), and reports whether it
// was not there before.
func (p *place) make(kind state.FileType) (bool, error) {
	var err error
	if kind == state.Directory {
		err = unix.Mkdirat(p.dir, p.name, 0o750)
	} else {
		var fd int
		if fd, err = unix.Openat(p.dir, p.name, unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o640); err == nil {
			err = unix.Close(fd)
		}
	}
	switch err {
	case nil:
		return true, nil
	case unix.EEXIST:
		return false, nil
	}
	return false, fmt.Errorf("create %s: %w", p.path, err)
}

// unlink removes an empty directory or a file.
func (p *place) unlink(kind state.FileType) error {
	flags := 0
	if kind == state.Directory {
		flags = unix.AT_REMOVEDIR
	}
	if err := unix.Unlinkat(p.dir, p.name, flags); err != nil {
		return fmt.Errorf("remove %s: %w", p.path, err)
	}
	return nil
}

// firstLink returns the first part of rel that is a symbolic link.
func firstLink(root int, rel string) string {
	for end := range rel + "/" {
		if end < len(rel) && rel[end] != '/' {
			continue
		}
		fd, err := openat2(root, rel[:end], unix.O_PATH|unix.O_NOFOLLOW, 0)
		if err != nil {
			break
		}
		st, err := statx(fd, "", 0)
		unix.Close(fd)
		if err == nil && st.Mode&unix.S_IFMT == unix.S_IFLNK {
			return rel[:end]
		}
	}
	return rel
}

func refuseLink(path string) error {
	return state.Errorf(state.InvalidArgument, "%s is a symbolic link: none is followed below the directory that holds all mounts; put a directory in its place", path)
}

// openat2 opens without following any symbolic link (openat2(2), Linux 5.6).
func openat2(dir int, name string, flags int, resolve uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC),
		Resolve: resolve | unix.RESOLVE_NO_SYMLINKS | unix.RESOLVE_NO_MAGICLINKS,
	}
	return rawfile.Retry(func() (int, error) { return unix.Openat2(dir, name, &how) })
}

// statx looks without waking an automount and without asking a server; an empty
// name is dir itself.
func statx(dir int, name string, mask int) (unix.Statx_t, error) {
	flags := unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT | unix.AT_STATX_DONT_SYNC
	if name == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	return rawfile.Retry(func() (st unix.Statx_t, err error) {
		err = unix.Statx(dir, name, flags, unix.STATX_BASIC_STATS|mask, &st)
		return st, err
	})
}

// missing reports whether an error says that there is no file at a path.
func missing(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) }

// fileType returns the type of a file by its mode.
func fileType(mode uint16) state.FileType {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return state.Directory
	case unix.S_IFREG:
		return state.RegularFile
	case unix.S_IFBLK:
		return state.BlockDevice
	}
	return state.OtherFile
}
