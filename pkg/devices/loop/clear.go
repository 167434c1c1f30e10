package loop

import (
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/state"
)

// Clear makes every byte of a volume zero and forgets that it was formatted.
func (b *Backend) Clear(ctx context.Context, volume string) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	if err := b.unused(ctx, volume); err != nil {
		return err
	}
	return b.pool.Clear(ctx, volume)
}

// Unused returns FailedPrecondition when a loop device shows the volume's data,
// or anybody else has it open.
func (b *Backend) Unused(ctx context.Context, volume string) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	return b.unused(ctx, volume)
}

// unused looks for a device first, which it can name.
func (b *Backend) unused(ctx context.Context, volume string) error {
	data, err := b.data(volume)
	if err != nil {
		return fmt.Errorf("volume %s: %w", volume, err)
	}
	switch d, err := b.current(ctx, b.tag(volume), b.stands(volume, data)); {
	case err != nil:
		return fmt.Errorf("volume %s: %w", volume, err)
	case d != nil && b.owns(d, volume):
		return state.Errorf(state.FailedPrecondition, "volume %s: it is attached as %s: unstage it first", volume, d)
	case d != nil:
		return foreign(volume, d)
	}
	return b.pool.CheckClosed(ctx, volume)
}
