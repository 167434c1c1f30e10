package mounts

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Usage tells how full the file system at a path is, in bytes and in inodes,
// which are all zero where a file system has no fixed number of them (btrfs).
// Available is what users other than root may still have, so Used and Available
// need not add up to Total. NotFound: the path does not exist.
//
// ctx ends the wait as it does for Look.
func (h *Host) Usage(ctx context.Context, path string) (state.Usage, error) {
	usage, err := wait(ctx, &h.usages, path, func() (state.Usage, error) { return h.usage(path) })
	switch {
	case err == nil:
		return usage, nil
	case missing(err):
		err = state.Errorf(state.NotFound, "%w", err)
	}
	return state.Usage{}, fmt.Errorf("usage of the file system at %s: %w", path, err)
}

func (h *Host) usage(path string) (state.Usage, error) {
	p, err := h.open(path)
	if err != nil {
		return state.Usage{}, err
	}
	defer p.close()
	fd, err := openat2(p.dir, p.name, unix.O_PATH, 0)
	switch {
	case err == unix.ELOOP:
		return state.Usage{}, refuseLink(path)
	case err != nil:
		return state.Usage{}, fmt.Errorf("open: %w", err)
	}
	defer unix.Close(fd)
	st, err := again(func() (st unix.Statfs_t, err error) {
		err = unix.Fstatfs(fd, &st)
		return st, err
	})
	if err != nil {
		return state.Usage{}, fmt.Errorf("statfs: %w", err)
	}
	block := int64(st.Frsize)
	return state.Usage{
		Bytes: state.Amount{
			Total:     int64(st.Blocks) * block,
			Used:      int64(st.Blocks-st.Bfree) * block,
			Available: int64(st.Bavail) * block,
		},
		Inodes: state.Amount{
			Total:     int64(st.Files),
			Used:      int64(st.Files - st.Ffree),
			Available: int64(st.Ffree),
		},
	}, nil
}
