package reconciler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// deviceWait is how long a caller waits for a missing device, which may still be on
	// its way to the node. Then the call fails, and the part backs off until a device
	// appears.
	deviceWait = 10 * time.Second
	// After a device event the device is looked for a few times, at pauses that double
	// from firstPause to lastPause: udev makes the links to a device after the kernel's
	// event, and sends none for them. Events within firstPause count as one.
	firstPause = 100 * time.Millisecond
	lastPause  = 1600 * time.Millisecond
)

// DeviceAppeared tells that a block device may have appeared. It observes the volumes
// whose device was missing at their last attach, and no others.
func (r *Reconciler) DeviceAppeared() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.awaited {
		r.wakeAwaiting(id)
	}
}

// DeviceEventsEnded tells that there are no device events, or no more of them (a pod
// with hostUsers: false gets none). From then on, a device for which a caller waits
// is polled.
func (r *Reconciler) DeviceEventsEnded() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.noEvents = true
	for id := range r.awaited {
		r.wakeAwaiting(id)
	}
}

// attach lets the backend attach the device. If the device is missing and a caller
// waits, attach waits for it.
func (r *Reconciler) attach(ctx context.Context, want *state.Volume) error {
	limit := time.NewTimer(deviceWait)
	defer limit.Stop()
	defer r.handOver(want.ID)
	for pause := firstPause; ; {
		news, noEvents := r.await(want.ID)
		err := r.kernel.Devices.Attach(ctx, r.spec(want), want.Stage.ReadOnly)
		if !errors.Is(err, devices.ErrNoDevice) {
			r.arrived(want.ID)
			return err
		}
		if !callerNeedsStage(want) {
			return err
		}
		trace.SpanFromContext(ctx).AddEvent("waits for the device")
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
			return fmt.Errorf("waited for %s: %w", deviceWait, err)
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

// awaiting is the wait for a volume's device. While the worker attaches, news is all
// that it needs to hear: each attach of a loop device is an event that tells of itself.
type awaiting struct {
	news   chan struct{} // closed when the device may have appeared
	worker bool          // waits, or is attaching
}

// await returns a channel that is closed when the device of a volume may have
// appeared, and whether there are no device events.
func (r *Reconciler) await(id string) (news <-chan struct{}, noEvents bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := &awaiting{make(chan struct{}), true}
	r.awaited[id] = a
	return a.news, r.noEvents
}

// handOver ends the worker's wait, and not the volume's: from now on, news queues the
// volume. Earlier news has ended the part's back-off already.
func (r *Reconciler) handOver(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if a := r.awaited[id]; a != nil {
		a.worker = false
	}
}

// arrived ends the wait for a volume's device.
func (r *Reconciler) arrived(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.awaited, id)
}

// wakeAwaiting tells the worker of a volume that the device for which it waits may
// have appeared, and ends the back-off of the parts that failed for want of it. A part
// that failed only once keeps its back-off, which ends soon. The caller holds mu.
func (r *Reconciler) wakeAwaiting(id string) {
	awaited := r.awaited[id]
	if awaited == nil {
		return
	}
	delete(r.awaited, id)
	close(awaited.news)
	for _, a := range r.volume(id).attempts {
		if errors.Is(a.err, devices.ErrNoDevice) && a.failures > 1 {
			a.failures, a.next = 0, time.Time{}
		}
	}
	if !awaited.worker {
		r.queue.Add(id)
	}
}
