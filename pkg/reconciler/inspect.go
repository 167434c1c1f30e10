package reconciler

import (
	"context"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// inspectTimeout bounds the look at one volume.
const inspectTimeout = 5 * time.Second

// Inspect observes every volume of the store and keeps the result for Reports and
// Explain. It changes nothing. It is for the tools on a node where no plugin runs, and
// must not be called beside Run.
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
		r.observed(want.ID, want, &have, makePlan(want, &have).plan, time.Time{})
	}
}

func (r *Reconciler) inspect(ctx context.Context, want *state.Volume) (state.Actual, error) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	return r.Observe(ctx, want)
}
