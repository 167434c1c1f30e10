package reconciler

import (
	"context"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/csi-node/csi-node/pkg/state"
)

// inspectTimeout bounds the look at one volume.
const inspectTimeout = 5 * time.Second

// inspectedAtOnce is how many volumes Inspect looks at together: each that hangs has a thread. It is
// more than a node usually has.
const inspectedAtOnce = 256

// Inspect observes every volume of the store and keeps the result for Reports and
// Explain. It changes nothing, and waits once for all that hang. It is for the tools on a
// node where no plugin runs, and must not be called beside Run.
func (r *Reconciler) Inspect(ctx context.Context) {
	var looks errgroup.Group
	looks.SetLimit(inspectedAtOnce)
	for _, want := range r.store.List() {
		looks.Go(func() error {
			r.inspect(ctx, want)
			return nil
		})
	}
	_ = looks.Wait() // none of them returns an error
}

func (r *Reconciler) inspect(ctx context.Context, want *state.Volume) {
	ctx, cancel := context.WithTimeout(ctx, inspectTimeout)
	defer cancel()
	have, err := r.Observe(ctx, want)
	if err == nil {
		r.observed(want.ID, want, &have, makePlan(want, &have).plan, time.Time{})
		return
	}
	r.unobserved(want.ID, want)
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, part := range want.Parts() {
		r.volume(want.ID).attempt(part).err = err
	}
}
