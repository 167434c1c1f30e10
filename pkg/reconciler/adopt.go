package reconciler

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// adopt turns a provisional stage into a real one, with what was observed of it.
func (r *Reconciler) adopt(ctx context.Context, want *state.Volume, have *state.Actual) error {
	backend, err := r.backendOf(ctx, want)
	if err != nil {
		return err
	}
	as := adopted(want, have).Stage
	options := ""
	if len(have.Stage.Mounts) > 0 {
		options = have.Stage.Mounts[0].Options
	}
	_, err = r.store.Edit(want.ID, func(v *state.Volume) error {
		if v.Stage != nil && v.Stage.Revision == want.Stage.Revision && v.Stage.Provisional {
			v.Adopt(as.Capability.FSType, options, as.ReadOnly, backend)
			remember(v.Stage, have)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing the record: %w", err)
	}
	klog.FromContext(ctx).Info("Adopted a stage that no intent explained", "path", as.Path)
	return nil
}

// backendOf names the backend of a volume whose record does not name it; empty: there
// is only one backend.
func (r *Reconciler) backendOf(ctx context.Context, want *state.Volume) (string, error) {
	all, several := r.kernel.Devices.(interface {
		Resolve(ctx context.Context, v devices.Volume) (string, error)
	})
	if want.Backend != "" || !several {
		return want.Backend, nil
	}
	return all.Resolve(ctx, r.spec(want))
}
