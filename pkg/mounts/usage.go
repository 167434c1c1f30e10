package mounts

import (
	"context"
	"fmt"
	"math"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// mountUsage is what Usage tells.
type mountUsage struct {
	mount state.Mount
	usage state.Usage
}

// Usage tells what is mounted at a path, on top, and how full it is, in bytes
// and in inodes, which are all zero where a file system has no fixed number of
// them (btrfs) and of the node of a device. Both are of the same mount, whatever
// is unmounted meanwhile. Available is what users other than root may still
// have, so Used and Available need not add up to Total. NotFound: the path is no
// mount point. Unavailable: what is mounted there is hidden, as for Look.
//
// ctx ends the wait as it does for Look.
func (h *Host) Usage(ctx context.Context, path string) (state.Mount, state.Usage, error) {
	u, err := answered(h.usages.Do(ctx, path, hang.NoLimit, func() (mountUsage, error) {
		m, usage, err := h.usage(path)
		if missing(err) || state.ClassOf(err) == state.NotFound {
			if _, hides := h.hidden(path); hides != nil {
				err = hides
			}
		}
		return mountUsage{m, usage}, err
	}))
	switch {
	case err == nil:
		return u.mount, u.usage, nil
	case missing(err):
		err = state.Errorf(state.NotFound, "%w", err)
	}
	return state.Mount{}, state.Usage{}, fmt.Errorf("usage of the file system at %s: %w", path, err)
}

// usage opens the root of the top mount once, so that all that it asks is asked
// of one mount.
func (h *Host) usage(path string) (state.Mount, state.Usage, error) {
	none := state.Usage{}
	p, err := h.open(path)
	if err != nil {
		return state.Mount{}, none, err
	}
	defer p.close()
	fd, err := openat2(p.dir, p.name, unix.O_PATH, 0)
	switch {
	case err == unix.ELOOP:
		return state.Mount{}, none, refuseLink(path)
	case err != nil:
		return state.Mount{}, none, fmt.Errorf("open: %w", err)
	}
	defer unix.Close(fd)
	m, err := h.mountOf(fd)
	if err != nil || m.Node {
		return m, none, err
	}
	usage, err := statfs(fd)
	return m, usage, err
}

// mountOf returns the mount that fd is the root of.
func (h *Host) mountOf(fd int) (state.Mount, error) {
	st, err := statx(fd, "", h.table.mask())
	switch {
	case err != nil:
		return state.Mount{}, fmt.Errorf("statx: %w", err)
	case st.Attributes&unix.STATX_ATTR_MOUNT_ROOT == 0:
		return state.Mount{}, state.Errorf(state.NotFound, "nothing is mounted there")
	}
	stack, err := h.table.stack(st.Mnt_id)
	if err != nil { // ENOENT: it has been unmounted
		return state.Mount{}, fmt.Errorf("mount id %d: %w", st.Mnt_id, err)
	}
	m := stack[0].mount()
	if fileType(st.Mode) == state.BlockDevice {
		m.Node, m.Device = true, state.DeviceNumber{Major: st.Rdev_major, Minor: st.Rdev_minor}
	}
	return m, nil
}

func statfs(fd int) (state.Usage, error) {
	st, err := rawfile.Retry(func() (st unix.Statfs_t, err error) {
		err = unix.Fstatfs(fd, &st)
		return st, err
	})
	if err != nil {
		return state.Usage{}, fmt.Errorf("statfs: %w", err)
	}
	return usageOf(st)
}

// usageOf refuses bytes that cannot be, as a superblock that was overwritten while it was
// mounted may tell: the CSI specification allows no negative number. Of inodes some servers
// tell nothing that makes sense; then they are not known.
func usageOf(st unix.Statfs_t) (usage state.Usage, err error) {
	block := int64(st.Frsize)
	if st.Bfree > st.Blocks || st.Bavail > st.Blocks || st.Blocks > uint64(math.MaxInt64/max(block, 1)) {
		return usage, state.Errorf(state.Unavailable, "the file system tells numbers that cannot be: of %d blocks %d are free; it is damaged", st.Blocks, st.Bfree)
	}
	usage.Bytes = state.Amount{
		Total:     int64(st.Blocks) * block,
		Used:      int64(st.Blocks-st.Bfree) * block,
		Available: int64(st.Bavail) * block,
	}
	if st.Ffree <= st.Files && st.Files <= math.MaxInt64 {
		usage.Inodes = state.Amount{
			Total:     int64(st.Files),
			Used:      int64(st.Files - st.Ffree),
			Available: int64(st.Ffree),
		}
	}
	return usage, nil
}
