package reconciler

import (
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// spec returns what a backend is told of a volume.
func spec(want *state.Volume) devices.Volume {
	v := devices.Volume{ID: want.ID, Backend: want.Backend}
	if want.Stage != nil {
		v.Context, v.Publish = state.SplitContext(want.Stage.Context)
	}
	return v
}
