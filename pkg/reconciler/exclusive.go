package reconciler

import (
	"context"
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// job is a function that a caller runs in a volume's worker, between two passes, when
// nothing else acts on the volume. act is called at most once.
type job struct {
	act       func(ctx context.Context)
	untilPass bool          // the caller also waits until the next pass has ended
	ended     chan struct{} // closed when the caller may go

	// Of Exclusive; Reconciler.mu guards them.
	left   bool // the caller has gone before f was called
	called bool // f was called, or will be at once: the caller stays
}

// Exclusive runs f in the volume's worker while nothing else acts on the
// volume: a request that comes meanwhile is carried out afterwards. want is the
// record, empty if there is none; have is what was just observed.
//
// It waits for its turn and for the observation until ctx ends (DeadlineExceeded,
// Canceled) or the plugin stops (Unavailable); then f is not called. Once f runs,
// Exclusive waits for its end and returns its error; f's own context ends when the
// plugin stops. If the observation fails, f is not called and its error is returned.
func (r *Reconciler) Exclusive(ctx context.Context, id string, f func(ctx context.Context, want *state.Volume, have state.Actual) error) error {
	var failed error
	j := &job{}
	j.act = func(ctx context.Context) {
		want := r.store.Get(id)
		if want == nil {
			want = &state.Volume{ID: id}
		}
		have, err := r.observeAlone(ctx, want)
		if err == nil {
			err = have.Device.Err
		}
		if err == nil && r.mayCall(j) {
			err = f(ctx, want, *have)
		}
		failed = err
	}
	if err := r.runJob(ctx, id, j); err != nil {
		return err
	}
	return failed
}

// mayCall reports whether the caller of a job of Exclusive is still there; then it stays.
func (r *Reconciler) mayCall(j *job) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	j.called = !j.left
	return j.called
}

// Retry ends the back-off of every part of a volume, and repairs also those parts
// whose repair is put off or switched off. It waits until the worker has tried them,
// and returns the report of the volume after that.
//
// NotFound: nothing is asked of the volume. DeadlineExceeded, Canceled: ctx
// ended first, and the attempt, if it had begun, goes on. Unavailable: the
// plugin stops.
func (r *Reconciler) Retry(ctx context.Context, id string) (report.Volume, error) {
	if r.store.Get(id) == nil {
		return report.Volume{}, state.Errorf(state.NotFound, "volume %s: nothing is asked of it on this node, so there is nothing to try again", id)
	}
	err := r.runJob(ctx, id, &job{untilPass: true, act: func(context.Context) {
		r.mu.Lock()
		defer r.mu.Unlock()
		for _, a := range r.volume(id).attempts {
			a.next = time.Time{}
		}
		for _, lost := range r.volume(id).repairs {
			if lost.state != intact {
				lost.state = repairing
			}
		}
	}})
	if err != nil {
		return report.Volume{}, err
	}
	record := r.store.Get(id)
	if record == nil {
		gone := report.Facts{Want: &state.Volume{ID: id}, Have: state.Actual{Device: state.Device{State: state.DeviceAbsent}}, Seen: true}
		return report.Make(gone, time.Now()), nil // all that was asked for was its end
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return report.Make(r.facts(record), time.Now()), nil
}

// runJob gives the volume's worker a job, and waits until it has ended. If ctx or the
// plugin ends first, a job that has not begun is cancelled.
func (r *Reconciler) runJob(ctx context.Context, id string, j *job) error {
	j.ended = make(chan struct{})
	r.mu.Lock()
	v := r.volume(id)
	v.jobs = append(v.jobs, j)
	r.mu.Unlock()
	r.queue.Add(id)
	early, stop := answerTimer(ctx)
	defer stop()
	var err error
	select {
	case <-j.ended:
		return nil
	case <-early:
		err = r.busy(id, state.DeadlineExceeded)
	case <-ctx.Done():
		err = r.busy(id, state.ClassOf(ctx.Err()))
	case <-r.stopped:
		err = state.Errorf(state.Unavailable, "volume %s: the plugin is stopping", id)
	}
	if !r.cancelJob(id, j) {
		<-j.ended
		return nil
	}
	return err
}

// cancelJob lets the caller of a job leave. It reports false if the caller must stay.
func (r *Reconciler) cancelJob(id string, j *job) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	i := slices.Index(v.jobs, j)
	if i >= 0 {
		v.jobs = slices.Delete(v.jobs, i, i+1)
	}
	r.forget(id)
	j.left = !j.called
	return j.left
}

// runJobs runs the jobs that wait, one after the other, and returns those whose callers
// wait for the next pass.
func (r *Reconciler) runJobs(ctx context.Context, id string) []*job {
	var untilPass []*job
	for ctx.Err() == nil {
		r.mu.Lock()
		v := r.volumes[id]
		if v == nil || len(v.jobs) == 0 {
			r.mu.Unlock()
			break
		}
		j := v.jobs[0]
		v.jobs = v.jobs[1:]
		r.mu.Unlock()
		j.act(ctx)
		if j.untilPass {
			untilPass = append(untilPass, j)
		} else {
			close(j.ended)
		}
	}
	return untilPass
}

// busy is the answer to the caller of a job whose time is up.
func (r *Reconciler) busy(id string, class state.Class) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	detail := "its worker is busy"
	if v := r.volume(id); !v.since.IsZero() {
		detail = "step " + v.step().Tell(time.Now(), time.Millisecond)
	}
	return state.Errorf(class, "volume %s: %s", id, detail)
}
