package reconciler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// sweep ends the inline volumes of pods that are gone, which nobody else unpublishes.
// It does so by the same edit as an unpublish.
type sweep struct {
	look    chan struct{} // holds a token if Sweep is to look now
	looking atomic.Bool   // a look is scheduled
	gone    podsGone      // by volume; Sweep's alone
}

const (
	// sweepInterval is how often Sweep looks for pods that are gone.
	sweepInterval = 10 * time.Minute
	// endTimeout bounds the wait for the end of one volume; after that the work goes on.
	endTimeout = time.Minute
)

// lookNow lets Sweep look for pods that are gone now. It does not block.
func (s *sweep) lookNow() {
	select {
	case s.look <- struct{}{}:
	default:
	}
}

// volumeMade tells Sweep that an inline volume was made.
func (s *sweep) volumeMade() {
	if !s.looking.Load() {
		s.lookNow()
	}
}

// Sweep ends the inline volumes whose pods are gone, until ctx ends. While there is
// no inline volume it only waits for one to be made.
func (r *Reconciler) Sweep(ctx context.Context) {
	if r.kernel.Inline == nil || r.kernel.Pods == nil {
		return
	}
	s := &r.sweep
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.look:
		case <-timer.C:
		}
		s.looking.Store(false) // this sweep may miss a volume that is made during it
		wait, err := r.sweepOnce(ctx)
		if err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "Cannot look for ephemeral volumes of pods that are gone")
			wait = sweepInterval
		}
		timer.Stop()
		if wait > 0 {
			timer.Reset(wait)
			s.looking.Store(true)
		}
	}
}

// sweepOnce looks at the pod of each inline volume, and returns when to look
// again; 0: there is no inline volume, so not before one is made.
func (r *Reconciler) sweepOnce(ctx context.Context) (wait time.Duration, err error) {
	ids, err := r.kernel.Inline.ListInline(ctx)
	if err != nil {
		return 0, err
	}
	gone := map[string]bool{}
	for _, id := range ids {
		owner, target, err := r.kernel.Inline.ownerOf(ctx, id)
		if state.ClassOf(err) == state.NotFound || err == nil && owner == nil {
			continue
		}
		if wait == 0 {
			wait = sweepInterval
		}
		if err != nil {
			continue // it may be an inline volume; what reads its facts reports the error
		}
		if !r.kernel.Pods.Gone(target) {
			continue
		}
		left := r.sweep.gone.note(id, true)
		if left == 0 {
			if err := r.endGone(ctx, id, target); err == nil {
				continue
			}
			left = podGoneGrace
		}
		gone[id] = true
		wait = min(wait, left)
	}
	maps.DeleteFunc(r.sweep.gone, func(id string, _ time.Time) bool { return !gone[id] })
	return wait, ctx.Err()
}

// endGone asks for the end of the volume of a pod that is gone.
func (r *Reconciler) endGone(ctx context.Context, id, target string) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	err := r.Ensure(ctx, id, state.TargetPart(target), func(v *state.Volume) error {
		return v.AskEnd(target, r.kernel.Inline.Staging(id), time.Now())
	})
	logger := klog.FromContext(ctx).WithValues("volume", id, "target", target)
	if err != nil {
		if !errors.Is(err, context.Canceled) {
			logger.Error(err, "Cannot delete the ephemeral volume of a pod that is gone; it is tried again")
		}
		return fmt.Errorf("volume %s: %w", id, err)
	}
	logger.Info("Deleted the ephemeral volume of a pod that is gone")
	return nil
}
