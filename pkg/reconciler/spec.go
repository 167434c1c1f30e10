package reconciler

import (
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// spec returns what a backend is told of a volume. A question that names the id
// alone is about what the record describes.
func (r *Reconciler) spec(want *state.Volume) devices.Volume {
	if want.Backend == "" && want.Stage == nil {
		if record := r.store.Get(want.ID); record != nil {
			want = record
		}
	}
	v := devices.Recorded(want)
	v.Secrets = r.secrets.get(want.ID)
	return v
}
