package filesystem

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Check repairs an unmounted file system that asks for it (Contents.NeedsCheck), as
// far as that is safe without a human, and verifies that it does not ask again.
// It blocks for a slot (see New) and for the program; when ctx ends, the
// program is killed.
//
// FailedPrecondition: a human must look, or the device is read-only.
// InvalidArgument: the type is not of Types. Other errors have no class.
func (h *Host) Check(ctx context.Context, facts state.Device, fsType string) (err error) {
	defer state.Wrap(&err, "check the %s on %s", fsType, facts.Path)
	return h.with(ctx, facts, fsType, func(d *device, k kind) error { return h.checkOpen(ctx, d, k) })
}

func (h *Host) checkOpen(ctx context.Context, d *device, k kind) error {
	fsType := k.traits().name
	if _, err := h.require(ctx, d.facts, fsType, ""); err != nil {
		return err
	}
	if err := k.check(ctx, d.facts.Path); err != nil {
		return err
	}
	after, err := h.require(ctx, d.facts, fsType, "")
	if err == nil && after.NeedsCheck {
		return state.Errorf(state.FailedPrecondition, "the check succeeded, but the superblock asks for another one: check by hand, with the volume unstaged")
	}
	return err
}

// require probes a device that must hold a file system of the type.
func (h *Host) require(ctx context.Context, facts state.Device, fsType, mountpoint string) (state.Contents, error) {
	c, err := h.Probe(ctx, facts, mountpoint)
	switch {
	case err != nil:
	case c.Unreadable:
		err = state.Errorf(state.Unavailable, "found %s: %w", c.Found, errUnreadable)
	case c.Kind != state.ContentsFilesystem || c.FSType != fsType:
		err = state.Errorf(state.FailedPrecondition, "the device holds %s", c.Found)
	}
	return c, err
}
