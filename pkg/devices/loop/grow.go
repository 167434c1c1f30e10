package loop

import (
	"context"
	"fmt"
)

// Grow makes the volume, its device and the view of that at least so many
// bytes large. A device may be grown while it is mounted.
func (b *Backend) Grow(ctx context.Context, volume string, bytes int64) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	if err := b.pool.Grow(ctx, volume, bytes); err != nil {
		return err
	}
	d, err := b.own(ctx, volume)
	if err == nil && d != nil {
		err = b.growDevices(ctx, d, bytes)
	}
	if err != nil {
		return fmt.Errorf("volume %s: grow: %w", volume, err)
	}
	return nil
}

// growDevices lets a device and its view take their backing's size.
func (b *Backend) growDevices(ctx context.Context, d *device, bytes int64) error {
	if err := setCapacity(d.name); err != nil {
		return err
	}
	after, err := ask(d.name)
	switch {
	case err != nil:
		return err
	case after == nil || after.bytes < bytes:
		return fmt.Errorf("%s did not take the size of %d bytes", d.path(), bytes)
	}
	view, err := b.recall(ctx, viewKey(d.number), showing(d.number))
	if view == nil || err != nil {
		return err
	}
	return setCapacity(view.name)
}
