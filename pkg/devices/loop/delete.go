package loop

import (
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/state"
)

// Delete deletes a volume and its data. It refuses while any loop device,
// the plugin's or not, still shows the data (FailedPrecondition).
func (b *Backend) Delete(ctx context.Context, volume string) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	data, err := b.data(volume)
	if err != nil {
		return fmt.Errorf("volume %s: delete: %w", volume, err)
	}
	switch d, err := b.current(ctx, b.tag(volume), b.stands(volume, data)); {
	case err != nil:
		return fmt.Errorf("volume %s: delete: %w", volume, err)
	case d != nil:
		return state.Errorf(state.FailedPrecondition, "volume %s: its data is still in use by %s", volume, d)
	}
	return b.pool.Delete(ctx, volume)
}
