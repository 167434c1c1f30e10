package reconciler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// patience is how long a caller waits for a device that is not there: it may be
	// being attached to the node. Then the caller is told, and the part backs off until
	// there is news.
	patience = 10 * time.Second
	// After news of a device it is looked for again a few times, at pauses that double from the
	// first to the last: udev makes links to a device after the kernel has told of it,
	// and nobody tells of that. News that come within the first are one.
	firstPause = 100 * time.Millisecond
	lastPause  = 1600 * time.Millisecond
)

// DeviceAppeared tells that there may be a block device now that was not there.
// Volumes are looked at whose device was not there when it was to be attached, and
// no others.
func (r *Reconciler) DeviceAppeared() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.awaited {
		r.wakeAwaiting(id)
	}
}

// DeviceEventsEnded tells that nobody tells of devices, or not any more, as where the
// kernel does not (a pod with hostUsers: false). A device for which a caller waits is
// looked for again and again then.
func (r *Reconciler) DeviceEventsEnded() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noEvents = true
	for id := range r.awaited {
		r.wakeAwaiting(id)
	}
}

// attach lets the backend attach the device. For a caller it waits for one that is
// not there.
func (r *Reconciler) attach(ctx context.Context, want *state.Volume) error {
	limit := time.NewTimer(patience)
	defer limit.Stop()
	for pause := firstPause; ; {
		news, noEvents := r.await(want.ID)
		err := r.kernel.Devices.Attach(ctx, r.spec(want), want.Stage.ReadOnly)
		if !errors.Is(err, devices.ErrNoDevice) {
			r.arrived(want.ID)
			return err
		}
		if !stageAsked(want) {
			return err
		}
		waits := fmt.Sprintf("waiting for the device: %v", err)
		state.Progress(ctx, "%s", waits)
		soon, again := time.After(firstPause), time.After(min(pause, lastPause))
		if pause > lastPause && !noEvents {
			again = nil
		}
		select {
		case <-news:
			pause = firstPause
		case <-again:
			pause *= 2
		case <-limit.C:
			return fmt.Errorf("waited for %s: %w", patience, err)
		case <-ctx.Done():
		}
		state.Progress(ctx, "%s", waits) // ends ctx when the intent was superseded
		select {
		case <-soon:
		case <-ctx.Done():
		}
		if ctx.Err() != nil {
			return fmt.Errorf("%w; %w", err, ctx.Err())
		}
	}
}

// await returns what is closed when the device of a volume may have come, and
// whether nobody tells of that.
func (r *Reconciler) await(id string) (news <-chan struct{}, noEvents bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.awaited[id] = make(chan struct{})
	return r.awaited[id], r.noEvents
}

// arrived ends await.
func (r *Reconciler) arrived(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.awaited, id)
}

// wakeAwaiting tells the worker of a volume that the device for which it waits may have
// come, and takes the part that backs off for that out of it, once: one that failed
// only once is due soon. The caller holds mu.
func (r *Reconciler) wakeAwaiting(id string) {
	news := r.awaited[id]
	if news == nil {
		return
	}
	delete(r.awaited, id)
	close(news)
	for _, a := range r.volume(id).attempts {
		if errors.Is(a.err, devices.ErrNoDevice) && a.failures > 1 {
			a.failures, a.next = 0, time.Time{}
		}
	}
	r.queue.Add(id)
}
