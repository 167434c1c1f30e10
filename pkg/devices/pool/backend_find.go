package pool

import (
	"context"
	"fmt"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// found is what the pool says of a volume, whether or not it has a device.
type found struct {
	facts  state.Device
	data   *loop.File // nil when there is none
	sector int        // bytes
	thick  bool
}

// shape returns the settings that the volume's device is to have.
func (k found) shape(readOnly bool) loop.Shape {
	return loop.Shape{ReadOnly: readOnly, Sector: k.sector, Solid: k.thick && !readOnly}
}

// factsLimit is how long Find waits for a volume's metadata: the pool's disk may
// hang, and attached devices are reported, and taken down, without it.
const factsLimit = 2 * time.Second

// Find returns the device of the volume. It looks only at the device in the index:
// what somebody else attaches meanwhile is found by Attach. A device whose volume is
// gone, or whose data is another file by now, is attached and Missing. The size is
// the smaller one of the device's and its view's, so that an expansion which did not
// reach the view is seen to be incomplete.
func (b *Backend) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	k, err := b.inspectWithin(ctx, v.ID)
	if ctx.Err() != nil || state.ClassOf(err) == state.InvalidArgument {
		return state.Device{}, err
	}
	if err != nil {
		k = found{facts: state.Device{Err: err}}
	}
	facts, target := k.facts, b.target(v.ID, k.data)
	facts.State = state.DeviceAbsent // until one is seen
	var view *loop.Device
	d, err := b.loops.Recall(ctx, target)
	if err == nil && d != nil {
		view, err = b.loops.Recall(ctx, loop.ViewOf(d.Number()))
	}
	switch {
	case err != nil:
		return state.Device{}, fmt.Errorf("volume %s: find: %w", v.ID, err)
	case d == nil:
	case !target.Owns(d):
		facts.State, facts.Holder = state.DeviceForeign, d.String()
	default:
		d.Facts(&facts)
		facts.Missing = facts.Missing || facts.Err == nil && d.File() != k.data.ID
		if view != nil {
			facts.Size = min(facts.Size, view.Bytes())
		}
	}
	return facts, nil
}

// inspectWithin is inspect with a time limit: a disk that hangs may never answer.
func (b *Backend) inspectWithin(ctx context.Context, volume string) (found, error) {
	if k, ok := b.inspectCached(volume); ok {
		return k, nil
	}
	k, err := b.inspections.Do(ctx, volume, factsLimit, func() (found, error) { return b.inspect(context.WithoutCancel(ctx), volume) })
	late, hangs := err.(*hang.Unanswered)
	switch {
	case !hangs:
		return k, err
	case ctx.Err() != nil:
		return found{}, ctx.Err()
	}
	return found{}, state.Errorf(state.DeadlineExceeded, "volume %s: the pool has not told of it since %s: check whether its disk answers", volume, state.Clock(late.Since))
}

// inspect reads a volume's metadata and looks at its data file.
func (b *Backend) inspect(ctx context.Context, volume string) (found, error) {
	path, err := b.pool.DataPath(volume)
	if err != nil {
		return found{}, err
	}
	v, err := b.pool.Get(ctx, volume)
	if state.ClassOf(err) == state.NotFound {
		return found{facts: state.Device{Missing: true}}, nil
	}
	if err != nil {
		return found{}, err
	}
	data, err := loop.StatFile(path)
	if err != nil {
		return found{}, fmt.Errorf("volume %s: %w", volume, err)
	}
	return newFound(v, path, data, b.pool.IsFresh(v)), nil
}

// inspectCached is inspect for a volume whose metadata is in the cache of facts, and whose
// files the kernel has in its caches: no disk is asked, so that it cannot hang. ok is false
// for any other volume.
func (b *Backend) inspectCached(volume string) (k found, ok bool) {
	path, err := b.pool.DataPath(volume)
	if err != nil {
		return k, false
	}
	v, ok := b.pool.getCached(volume)
	if !ok || v.mayBeFresh() {
		return k, false
	}
	data, err := loop.StatInCache(path)
	if err != nil {
		return k, false
	}
	return newFound(v, path, data, false), true
}

// newFound puts together what the metadata and the data file of a volume say.
func newFound(v Volume, path string, data *loop.File, fresh bool) found {
	k := found{
		facts:  state.Device{Capacity: v.Bytes, Backing: path, Formatting: v.Formatting, Formatted: v.Formatted, Raw: v.Raw, Fresh: fresh, CreatedFor: v.FSType, Missing: data == nil},
		data:   data,
		sector: int(v.sector()),
		thick:  v.Provisioning == Thick,
	}
	if data != nil {
		k.facts.Size, k.facts.Lacks = data.Bytes, max(v.Bytes-data.Bytes, 0)
	}
	return k
}
