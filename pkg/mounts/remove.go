package mounts

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Remove deletes an empty directory or an empty regular file, if it exists. Anything
// else stays, and is FailedPrecondition: a mount point, a device node, a symbolic link,
// a file or directory that is not empty.
func (h *Host) Remove(ctx context.Context, path string) error {
	p, err := h.begin(ctx, path)
	if err == nil {
		defer p.close()
		err = p.remove()
	}
	if err != nil && !missing(err) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}

// Renew puts a new directory with the same mode, owner and SELinux label in the
// place of an empty one on which nothing is mounted. Of an unmounted directory
// other mount namespaces may still have copies of the mount; the kernel drops
// them with the directory (detach_mounts in fs/namei.c, Linux 3.18). Files open
// in such a copy keep their file system all the same.
//
// FailedPrecondition: it is no empty directory, or a mount point. A directory is
// at the path at all times: the new one is made elsewhere and renamed over it. What
// a crash leaves of it, Sweep removes, or the next call for the path.
func (h *Host) Renew(ctx context.Context, path string) error {
	p, err := h.begin(ctx, path)
	if err == nil {
		defer p.close()
		err = h.renew(p)
	}
	if err != nil {
		return fmt.Errorf("renew %s: %w", path, err)
	}
	return nil
}

// sparePrefix begins the name of a directory that is to be renamed over another.
const sparePrefix = ".csi-node-spare-"

// spare returns the path, in a directory, at which the new one for another path is made.
func spare(dir, path string) string {
	sum := sha256.Sum256([]byte(path))
	return filepath.Join(dir, sparePrefix+hex.EncodeToString(sum[:8]))
}

// Sweep removes what calls of Renew have left whose process was killed. A call that runs
// meanwhile may fail.
func (h *Host) Sweep() error {
	entries, err := os.ReadDir(h.real)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), sparePrefix) {
			if err := unix.Rmdir(filepath.Join(h.real, entry.Name())); err != nil && err != unix.ENOENT {
				return fmt.Errorf("remove %s: %w", filepath.Join(h.root, entry.Name()), err)
			}
		}
	}
	return nil
}

func (p *place) remove() error {
	if err := unix.Unlinkat(p.dir, p.name, unix.AT_REMOVEDIR); err == nil || err == unix.ENOENT {
		return err
	}
	fd, err := openat2(p.dir, p.name, unix.O_PATH|unix.O_NOFOLLOW, unix.RESOLVE_NO_XDEV)
	switch {
	case err == unix.EXDEV:
		return refusedRemoval(p, "is a mount point")
	case err != nil:
		return err
	}
	st, err := statx(fd, "", 0)
	unix.Close(fd)
	kind := fileType(st.Mode)
	switch {
	case err != nil:
		return err
	case kind != state.Directory && kind != state.RegularFile:
		return refusedRemoval(p, "is %s", kind)
	case kind == state.RegularFile && st.Size > 0:
		return refusedRemoval(p, "holds %d bytes", st.Size)
	}
	return p.refusal(p.unlink(kind))
}

// refusal explains the error of what removes an empty file or directory.
func (p *place) refusal(err error) error {
	switch {
	case errors.Is(err, unix.ENOTEMPTY), errors.Is(err, unix.EEXIST):
		return refusedRemoval(p, "is not empty")
	case errors.Is(err, unix.EBUSY):
		return refusedRemoval(p, "is a mount point or somebody's root directory")
	}
	return err
}

// labelName is where SELinux keeps the label of a file.
const labelName = "security.selinux"

func (h *Host) renew(p *place) error {
	fd, err := p.openDirectory()
	if err != nil {
		return err
	}
	st, label, err := describeDirectory(fd)
	unix.Close(fd)
	if err != nil {
		return err
	}
	// Not beside it: there kubelet wants to remove a directory that is empty by then. But
	// the root may be another file system, such as a container's own that is read-only.
	err = h.replace(p, h.root, st, label)
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EROFS) {
		err = h.replace(p, filepath.Dir(p.path), st, label)
	}
	return err
}

// replace renames a new directory, made in dir, over that of the place.
func (h *Host) replace(p *place, dir string, st unix.Statx_t, label []byte) error {
	next, err := h.open(spare(dir, p.path))
	if err != nil {
		return err
	}
	defer next.close()
	if err := next.remove(); err != nil && !missing(err) {
		return err
	}
	if _, err := next.make(state.Directory); err != nil {
		return err
	}
	if err = next.dress(st, label); err == nil {
		err = p.refusal(unix.Renameat(next.dir, next.name, p.dir, p.name))
	}
	if err != nil {
		return errors.Join(err, next.unlink(state.Directory))
	}
	return nil
}

// dress gives a directory a mode, an owner, and a SELinux label if there is one.
func (p *place) dress(like unix.Statx_t, label []byte) error {
	fd, err := p.openDirectory()
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if err := unix.Fchown(fd, int(like.Uid), int(like.Gid)); err != nil {
		return fmt.Errorf("chown: %w", err)
	}
	if err := unix.Fchmod(fd, uint32(like.Mode)&^unix.S_IFMT); err != nil { // after chown, which may clear setgid
		return fmt.Errorf("chmod: %w", err)
	}
	if len(label) > 0 {
		if err := unix.Fsetxattr(fd, labelName, label, 0); err != nil {
			return fmt.Errorf("set %s: %w", labelName, err)
		}
	}
	return nil
}

// openDirectory opens a directory on which nothing is mounted.
func (p *place) openDirectory() (int, error) {
	fd, err := openat2(p.dir, p.name, unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_XDEV)
	switch err {
	case nil:
		return fd, nil
	case unix.EXDEV:
		return -1, refusedRemoval(p, "is a mount point")
	case unix.ENOTDIR, unix.ELOOP:
		return -1, refusedRemoval(p, "is no directory")
	}
	return -1, err
}

// describeDirectory returns the mode, the owner and the SELinux label, which is
// empty where there is none.
func describeDirectory(fd int) (unix.Statx_t, []byte, error) {
	st, err := statx(fd, "", 0)
	if err != nil {
		return st, nil, fmt.Errorf("statx: %w", err)
	}
	label := make([]byte, 4<<10) // a page, the most that SELinux writes
	n, err := unix.Fgetxattr(fd, labelName, label)
	switch err {
	case nil:
		return st, label[:n], nil
	case unix.ENODATA, unix.EOPNOTSUPP:
		return st, nil, nil
	}
	return st, nil, fmt.Errorf("read %s: %w", labelName, err)
}

// refusedRemoval says why a file or directory stays.
func refusedRemoval(p *place, why string, args ...any) error {
	return state.Errorf(state.FailedPrecondition, "%s %s: it is not removed", p.path, fmt.Sprintf(why, args...))
}
