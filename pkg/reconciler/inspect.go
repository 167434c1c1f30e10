package reconciler

import (
	"context"
	"fmt"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// inspectTime bounds the look at one volume.
const inspectTime = 5 * time.Second

// Inspect looks at every volume of the store and keeps what it saw for Status
// and Explain. It acts on nothing, and is for the tools that look at a node on
// which no plugin runs: it must not be called beside Run.
func (r *Reconciler) Inspect(ctx context.Context) {
	for _, want := range r.store.List() {
		have, err := r.inspect(ctx, want)
		if err != nil {
			r.unobserved(want.ID, want)
			r.mu.Lock()
			for _, part := range want.Parts() {
				r.volume(want.ID).attempt(part).err = err
			}
			r.mu.Unlock()
			continue
		}
		r.observed(want.ID, want, have, MakePlan(want, have))
	}
}

func (r *Reconciler) inspect(ctx context.Context, want *state.Volume) (state.Actual, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTime)
	defer cancel()
	return r.Observe(ctx, want)
}

// Unasked looks whether a device stands for a volume of which nothing is asked,
// an orphan, and detaches it, with the view over it, if detach is set and nobody
// uses it. kept tells why it has to stay; it is empty otherwise.
//
// It waits for its turn as Exclusive does.
func (r *Reconciler) Unasked(ctx context.Context, id string, detach bool) (orphan bool, kept string, err error) {
	err = r.Exclusive(ctx, id, func(ctx context.Context, want *state.Volume, have state.Actual) error {
		if !want.Empty() || !stands(have.Device) {
			return nil
		}
		orphan = true
		switch {
		case have.Device.Held:
			kept = "it is in use: " + r.whoHolds(ctx, have.Device)
		case have.View.Held:
			kept = "its read-only view is in use: " + r.whoHolds(ctx, have.View)
		case stands(have.View):
			kept = r.inUse(ctx, have.View)
		default:
			kept = r.inUse(ctx, have.Device)
		}
		if kept != "" || !detach {
			return nil
		}
		if stands(have.View) {
			if err := r.kernel.Views.DetachView(ctx, have.Device); err != nil {
				return fmt.Errorf("volume %s: %w", id, err)
			}
			if kept = r.inUse(ctx, have.Device); kept != "" {
				return nil
			}
		}
		for i := len(have.Lower); i > 0; i-- { // from the top
			if e := have.Stack()[i]; standsOrStrays(e.Device) {
				if err := r.onLayer(ctx, Step{Action: CloseLayer, Layer: e.Layer}, want, have); err != nil {
					return fmt.Errorf("volume %s: %w", id, err)
				}
			}
		}
		if err := r.kernel.Devices.Detach(ctx, devices.Volume{ID: id}); err != nil {
			return fmt.Errorf("volume %s: %w", id, err)
		}
		return nil
	})
	return orphan, kept, err
}

// inUse names who uses a device that nobody has claimed: whoever has its node
// open, as a pod with a raw volume does, would meet another volume under its
// number once it is detached. It is empty when there is none.
func (r *Reconciler) inUse(ctx context.Context, d state.Device) string {
	if who := r.holders(ctx, d); who != "" {
		return d.Path + " is open: " + who
	}
	return ""
}

// whoHolds names who holds a device, as far as that can be seen.
func (r *Reconciler) whoHolds(ctx context.Context, d state.Device) string {
	if d.Holder == "" {
		d.Holder = r.holders(ctx, d)
	}
	return holder(d)
}
