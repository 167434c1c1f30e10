package reconciler

import (
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// spec returns what a backend is told of a volume. If want has only an id, it is
// completed from the record.
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
