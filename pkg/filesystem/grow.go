package filesystem

import (
	"context"
	"errors"
	"fmt"

	"github.com/csi-node/csi-node/pkg/state"
)

// Grow makes a file system as large as its device allows and verifies that
// nothing is left to grow; one that is as large already is left alone.
// mountpoint is where it is mounted on this node, "" when it is not mounted.
// It blocks as long as the kernel or the helper program works, also when ctx ends: only the
// check before an unmounted ext4 grows is killed then.
//
// FailedPrecondition: this kind cannot grow as things are (Contents.GrowsMounted
// and GrowsUnmounted tell beforehand), or the device is read-only.
// InvalidArgument: the type is not of Types. Other errors have no class.
func (h *Host) Grow(ctx context.Context, facts state.Device, fsType, mountpoint string) (err error) {
	defer state.Wrap(&err, "grow the %s on %s", fsType, facts.Path)
	k, err := h.kind(fsType)
	if err != nil {
		return err
	}
	before, err := h.require(ctx, facts, fsType, mountpoint)
	switch {
	case err != nil:
		return err
	case !before.Growable:
		return nil
	case facts.ReadOnly:
		return state.Errorf(state.FailedPrecondition, "the device is read-only")
	case mountpoint == "" && !before.GrowsUnmounted:
		return state.Errorf(state.FailedPrecondition, "it grows only while it is mounted")
	case mountpoint != "" && !before.GrowsMounted:
		return state.Errorf(state.FailedPrecondition, "this process may not grow it while it is mounted (give the plugin CAP_SYS_RESOURCE, or let it grow when the volume is staged next)")
	}
	d, err := open(facts, 0)
	if err != nil {
		return err
	}
	if err := errors.Join(h.growOpen(ctx, d, k, mountpoint), d.Close()); err != nil {
		return err
	}
	after, err := h.require(ctx, facts, fsType, mountpoint)
	if err == nil && after.Growable {
		return fmt.Errorf("it was to grow from %d bytes and has %d now, fewer than the device allows", before.Size, after.Size)
	}
	return err
}

func (h *Host) growOpen(ctx context.Context, d *device, k kind, mountpoint string) error {
	_, sb, other := h.recognise(d)
	if other != nil || sb == nil {
		return errors.New("the device has changed meanwhile")
	}
	if mountpoint != "" {
		if err := k.live(d, mountpoint, sb); err != nil {
			return err
		}
	}
	if err := k.grow(ctx, d, mountpoint, sb.grown(d.bytes)); err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		return fmt.Errorf("flush: %w", err)
	}
	return nil
}
