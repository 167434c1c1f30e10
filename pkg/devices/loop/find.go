package loop

import (
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/state"
)

// Find tells what stands for the volume. It looks at the device of the index
// only: what something else attaches meanwhile is found by Attach. A device
// whose volume is gone, or whose data is another file by now, is attached and
// Missing.
func (b *Backend) Find(ctx context.Context, volume string) (state.Device, error) {
	facts, data, err := b.volume(ctx, volume)
	if err != nil {
		return state.Device{}, err
	}
	d, err := b.recall(ctx, b.tag(volume), b.stands(volume, data))
	switch {
	case err != nil:
		return state.Device{}, fmt.Errorf("volume %s: find: %w", volume, err)
	case d == nil:
	case !b.owns(d, volume):
		facts.State, facts.Holder = state.DeviceForeign, d.String()
	default:
		d.facts(&facts)
		facts.Missing = facts.Missing || d.file() != data.id
	}
	return facts, nil
}

// volume returns what is known of a volume without a device, and of its data;
// nil when there is none.
func (b *Backend) volume(ctx context.Context, volume string) (state.Device, *file, error) {
	path, err := b.pool.DataPath(volume)
	if err != nil {
		return state.Device{}, nil, err
	}
	v, err := b.pool.Get(ctx, volume)
	if state.ClassOf(err) == state.NotFound {
		return state.Device{Missing: true}, nil, nil
	}
	if err != nil {
		return state.Device{}, nil, err
	}
	data, err := statFile(path)
	if err != nil {
		return state.Device{}, nil, fmt.Errorf("volume %s: %w", volume, err)
	}
	facts := state.Device{Capacity: v.Bytes, Backing: path, Formatting: v.Formatting, Formatted: v.Formatted}
	if data == nil {
		facts.Missing = true
		return facts, nil, nil
	}
	facts.Size = data.bytes
	return facts, data, nil
}
