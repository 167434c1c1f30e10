package driver

import (
	"context"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// Clearance is what was found on a volume that is, or could be, cleared.
type Clearance = reconciler.Clearance

// clearDevice looks at what is on a volume that nothing uses, and destroys it
// if do is set.
func (p *plugin) clearDevice(ctx context.Context, id string, do bool) (Clearance, error) {
	return p.reconciler.Clear(ctx, id, do)
}

// volumeOf returns what a backend is told of a volume with a record.
func volumeOf(record *state.Volume) devices.Volume {
	v := devices.Volume{ID: record.ID, Backend: record.Backend}
	if record.Stage != nil {
		v.Context, v.Publish = state.SplitContext(record.Stage.Context)
	}
	return v
}
