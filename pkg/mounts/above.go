package mounts

import (
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Above returns the mount that holds the directory of a path, or of that the
// part which exists, and its mount point; nothing if that is the mount that holds
// the root. It looks at the directories on the way, as Check does.
func (h *Host) Above(path string) (m state.Mount, point string, err error) {
	p, err := h.open(path)
	for missing(err) {
		path = filepath.Dir(path)
		if _, outside := h.relative(path); outside != nil {
			return m, "", nil
		}
		p, err = h.open(path)
	}
	if err != nil {
		return m, "", err
	}
	defer p.close()
	dir, err := statx(p.dir, "", h.table.mask())
	if err != nil {
		return m, "", fmt.Errorf("statx of the directory of %s: %w", path, err)
	}
	root, err := statx(unix.AT_FDCWD, h.real, h.table.mask())
	switch {
	case err != nil:
		return m, "", fmt.Errorf("statx of %s: %w", h.real, err)
	case root.Mnt_id == dir.Mnt_id:
		return m, "", nil
	}
	stack, err := h.table.stack(dir.Mnt_id)
	if err != nil {
		return m, "", fmt.Errorf("mount id %d: %w", dir.Mnt_id, err)
	}
	return stack[0].mount(), stack[0].point, nil
}
