package pool

import (
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// Clear makes every byte of a volume zero and forgets that it was formatted.
func (b *Backend) Clear(ctx context.Context, v devices.Volume) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	if err := b.unused(ctx, v.ID); err != nil {
		return err
	}
	return b.pool.Clear(ctx, v.ID)
}

// Unused returns FailedPrecondition when a loop device shows the volume's data,
// or anybody else has it open.
func (b *Backend) Unused(ctx context.Context, v devices.Volume) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	return b.unused(ctx, v.ID)
}

// unused looks for a device first, because it can name that in its error.
func (b *Backend) unused(ctx context.Context, id string) error {
	target, d, err := b.user(ctx, id)
	switch {
	case err != nil:
		return fmt.Errorf("volume %s: %w", id, err)
	case d != nil && target.Owns(d):
		return state.Errorf(state.FailedPrecondition, "volume %s: it is attached as %s: unstage it first", id, d)
	case d != nil:
		return fmt.Errorf("volume %s: %w", id, loop.Foreign(d))
	}
	return b.pool.CheckClosed(ctx, id)
}

// user returns the device that shows a volume's data, whoever attached it.
func (b *Backend) user(ctx context.Context, id string) (target loop.Target, d *loop.Device, err error) {
	data, err := b.data(id)
	if err != nil {
		return target, nil, err
	}
	target = b.target(id, data)
	d, err = b.loops.Current(ctx, target)
	return target, d, err
}

// Delete deletes a volume and its data. It refuses while any loop device,
// the plugin's or not, still shows the data (FailedPrecondition).
func (b *Backend) Delete(ctx context.Context, id string) error {
	done, err := b.turn(ctx, id)
	if err != nil {
		return err
	}
	defer done()
	switch _, d, err := b.user(ctx, id); {
	case err != nil:
		return fmt.Errorf("volume %s: delete: %w", id, err)
	case d != nil:
		return state.Errorf(state.FailedPrecondition, "volume %s: its data is still in use by %s", id, d)
	}
	return b.pool.Delete(ctx, id)
}
