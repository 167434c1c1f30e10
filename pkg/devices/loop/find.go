package loop

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// defaultSector is the logical sector, in bytes, of a volume whose metadata
// names none: what loop devices have by default. It never depends on the pool's
// disk, as data made with sectors of 512 bytes cannot be used with 4096.
const defaultSector = 512

// known is what is known of a volume without a device.
type known struct {
	facts  state.Device
	data   *file // nil when there is none
	sector int   // bytes
	thick  bool
}

// shape returns how the volume's device is to be.
func (k known) shape(readOnly bool) shape {
	return shape{readOnly: readOnly, sector: k.sector, solid: k.thick && !readOnly}
}

// factsLimit is how long Find waits for a volume's metadata: the pool's disk may
// hang, and devices that stand are told, and taken down, without it.
const factsLimit = 2 * time.Second

// Find tells what stands for the volume. It looks at the device of the index
// only: what something else attaches meanwhile is found by Attach. A device
// whose volume is gone, or whose data is another file by now, is attached and
// Missing. The size is that of the device and of its view, the smaller of the
// two, so that a growth which did not reach the view is seen not to be complete.
func (b *Backend) Find(ctx context.Context, volume string) (state.Device, error) {
	v, err := b.volumeWithin(ctx, volume)
	if ctx.Err() != nil || state.ClassOf(err) == state.InvalidArgument {
		return state.Device{}, err
	}
	if err != nil {
		v = known{facts: state.Device{Err: err}}
	}
	facts, data := v.facts, v.data
	facts.State = state.DeviceAbsent // until a device is seen
	var view *device
	match := b.stands(volume, data)
	if facts.Err != nil {
		match.is = func(*device) bool { return true }
	}
	d, err := b.recall(ctx, b.tag(volume), match)
	if err == nil && d != nil {
		view, err = b.recall(ctx, viewKey(d.number), showing(d.number))
	}
	switch {
	case err != nil:
		return state.Device{}, fmt.Errorf("volume %s: find: %w", volume, err)
	case d == nil, facts.Err != nil && !b.owns(d, volume): // whether that is the volume's data is not known
	case !b.owns(d, volume):
		facts.State, facts.Holder = state.DeviceForeign, d.String()
	default:
		d.facts(&facts)
		facts.Missing = facts.Missing || facts.Err == nil && d.file() != data.id
		if view != nil {
			facts.Size = min(facts.Size, view.bytes)
		}
	}
	return facts, nil
}

// asking is a look at a volume's metadata that is under way.
type asking struct {
	since time.Time
	done  chan struct{}
}

// volumeWithin is volume, on a goroutine that may be lost to a disk that hangs;
// no volume ever has more than one.
func (b *Backend) volumeWithin(ctx context.Context, volume string) (known, error) {
	type answer struct {
		known
		err error
	}
	for {
		b.mu.Lock()
		a, own := b.asked[volume], false
		answers := make(chan answer, 1)
		if a == nil {
			a, own = &asking{since: time.Now(), done: make(chan struct{})}, true
			b.asked[volume] = a
			go func() {
				k, err := b.volume(context.WithoutCancel(ctx), volume)
				answers <- answer{k, err}
				b.mu.Lock()
				delete(b.asked, volume)
				b.mu.Unlock()
				close(a.done)
			}()
		}
		b.mu.Unlock()
		limit := time.NewTimer(factsLimit - time.Since(a.since)) // at once for one that hangs
		select {
		case <-a.done:
		case <-ctx.Done():
		case <-limit.C:
		}
		limit.Stop()
		select {
		case <-a.done:
			if own {
				known := <-answers
				return known.known, known.err
			} // else it may have begun before what this caller is to see
		default:
			if ctx.Err() != nil {
				return known{}, ctx.Err()
			}
			return known{}, state.Errorf(state.DeadlineExceeded, "volume %s: the pool has not told of it for %s: see whether its disk answers", volume, time.Since(a.since).Round(time.Second))
		}
	}
}

// volume looks at a volume's metadata and its data.
func (b *Backend) volume(ctx context.Context, volume string) (known, error) {
	path, err := b.pool.DataPath(volume)
	if err != nil {
		return known{}, err
	}
	v, err := b.pool.Get(ctx, volume)
	if state.ClassOf(err) == state.NotFound {
		return known{facts: state.Device{Missing: true}}, nil
	}
	if err != nil {
		return known{}, err
	}
	data, err := statFile(path)
	if err != nil {
		return known{}, fmt.Errorf("volume %s: %w", volume, err)
	}
	k := known{
		facts:  state.Device{Capacity: v.Bytes, Backing: path, Formatting: v.Formatting, Formatted: v.Formatted, Raw: v.Raw, Fresh: b.pool.IsFresh(v), CreatedFor: v.FSType, Missing: data == nil},
		data:   data,
		sector: cmp.Or(int(v.SectorBytes), defaultSector),
		thick:  v.Provisioning == pool.Thick,
	}
	if data != nil {
		k.facts.Size = data.bytes
	}
	return k, nil
}
