package mounts

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path/filepath"

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
// at the path at all times: the new one is made elsewhere (spare) and renamed over
// it. What a crash leaves of it is an empty directory, which the next call takes.
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

// spare returns the place where the new directory for a path is made: not beside it, where
// kubelet wants to remove a directory that is empty by then, but a level above, if that is
// the host's.
func (h *Host) spare(path string) (*place, error) {
	sum := sha256.Sum256([]byte(path))
	name, parent := ".csi-node-"+hex.EncodeToString(sum[:8]), filepath.Dir(path)
	if p, err := h.open(filepath.Join(filepath.Dir(parent), name)); err == nil {
		return p, nil
	}
	return h.open(filepath.Join(parent, name))
}

func (p *place) remove() error {
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
	next, err := h.spare(p.path)
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
