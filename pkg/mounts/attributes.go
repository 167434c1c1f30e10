package mounts

import (
	"context"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// SetAttributes sets and clears attributes of the top mount at path; others
// stay, and so does the superblock (flags.Super). A path that is no mount point
// is an error. A mount that somebody writes through does not become read-only:
// the error says busy and names who holds the file system.
func (h *Host) SetAttributes(ctx context.Context, path string, flags state.Flags) error {
	p, err := h.begin(ctx, path)
	if err == nil {
		defer p.close()
		err = setAttributes(p.dir, p.name, flags, 0)
		h.noteAttributes(p.real)
	}
	switch {
	case err == nil:
		return nil
	case err == unix.EINVAL:
		err = fmt.Errorf("it is not a mount point, or the kernel does not know the attributes %q: %w", flags.Set, err)
	case err == unix.EBUSY:
		err = inUse(h.users(ctx, p))
	}
	return fmt.Errorf("set the attributes of the mount at %s: %w", path, err)
}

// noteAttributes tells the watchers that the attributes of a mount have changed.
func (h *Host) noteAttributes(point string) {
	for _, w := range h.openWatchers() {
		w.forgetAttributes(point)
	}
}

// setAttributes calls mount_setattr(2), Linux 5.12; an empty name is fd itself,
// and a propagation of zero leaves that as it is. The access time is one choice
// of three: whoever sets it clears all of it.
func setAttributes(fd int, name string, flags state.Flags, propagation uint64) error {
	attr := unix.MountAttr{Attr_set: uint64(flags.Set), Attr_clr: uint64(flags.Clear), Propagation: propagation}
	if (flags.Set|flags.Clear)&state.AtimeMask != 0 {
		attr.Attr_clr |= uint64(state.AtimeMask)
	}
	if attr == (unix.MountAttr{}) {
		return nil
	}
	how := uint(unix.AT_SYMLINK_NOFOLLOW | unix.AT_NO_AUTOMOUNT)
	if name == "" {
		how |= unix.AT_EMPTY_PATH
	}
	return unix.MountSetattr(fd, name, how, &attr)
}
