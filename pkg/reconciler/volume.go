package reconciler

import (
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/csi-node/csi-node/pkg/state"
)

// volume is what the reconciler keeps in memory about one volume: who waits, what
// runs, what failed, and the last observation. Reconciler.mu guards it.
type volume struct {
	waiters      map[*waiter]struct{}
	attempts     map[state.Part]*attempt // of parts that failed or are stuck
	jobs         []*job                  // that wait for their turn
	repairs      map[state.Part]*repair  // of parts that were lost
	podGoneSince podsGone                // by target path
	running      Step
	since        time.Time // when running began; zero when no step runs
	progress     string    // how far that step is, for humans; may be empty

	spread      bool          // it was in the store at the start, and its first resync is not scheduled yet
	unseen      bool          // it was in the store at the start, and is not observed yet
	want        *state.Volume // at the last observation; never changed in place
	have        *state.Actual // never changed in place: reports share it
	deviceSeen  time.Time     // when the device was looked at for have; zero: unknown, or steps came after
	plan        Plan          // of the last observation, see lastPlan
	planDropped bool          // plan settled all and was dropped, to save memory

	deviceChanged bool // a change of the device was told since it was last looked at

	locked  bool                 // the secret was missing or wrong, and no call has come since
	numbers []state.DeviceNumber // its keys in Reconciler.volumesByDevice

	called trace.SpanContext // the last traced call that asked for something
	span   trace.SpanContext // of the running step
}

// volume returns the entry of a volume, and makes it if there is none. The caller
// holds mu.
func (r *Reconciler) volume(id string) *volume {
	v := r.volumes[id]
	if v == nil {
		v = &volume{want: &state.Volume{ID: id}, have: &state.Actual{}}
		r.volumes[id] = v
	}
	return v
}

// forget drops the entry of a volume that has no record and nobody waiting.
// The caller holds mu.
func (r *Reconciler) forget(id string) {
	v := r.volumes[id]
	if v != nil && len(v.waiters) == 0 && len(v.attempts) == 0 && len(v.jobs) == 0 && v.since.IsZero() && v.want.Empty() && r.store.Get(id) == nil {
		v.have = &state.Actual{}
		r.index(id, v) // drops its device numbers
		delete(r.volumes, id)
		delete(r.adopting, id)
		delete(r.awaited, id)
		r.secrets.forget(id)
	}
}

// observed keeps the last observation of a volume. at is when its device was looked at; zero:
// no call is answered by that.
func (r *Reconciler) observed(id string, want *state.Volume, have *state.Actual, plan Plan, at time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	v.unseen, v.want, v.have, v.deviceSeen, v.plan, v.planDropped = false, want, have, at, plan, false
	delete(r.adopting, id)
	r.index(id, v)
}

// unobserved notes that the last observation failed.
func (r *Reconciler) unobserved(id string, want *state.Volume) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	v.want, v.deviceSeen, v.plan, v.planDropped = want, time.Time{}, Plan{}, false
	delete(r.adopting, id)
	clear(v.podGoneSince) // podGoneGrace starts again with the next observation
}

// rest drops the plan of a volume that is settled: lastPlan makes it again. The caller
// holds mu.
func (v *volume) rest() {
	if v.plan.Verdicts != nil && len(v.plan.Steps) == 0 && v.plan.settled() {
		v.plan, v.planDropped = Plan{}, true
	}
}

// lastPlan returns the plan of the last observation. The caller holds mu.
func (v *volume) lastPlan() Plan {
	if v.planDropped {
		return makePlan(v.want, v.have).plan
	}
	return v.plan
}

// noteSecretRefused notes that a step failed because the secret that is known was missing
// or wrong.
func (r *Reconciler) noteSecretRefused(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.volume(id).locked = true
}

// needsSecretFromCall reports whether only a call can bring the secret that a volume needs.
func (r *Reconciler) needsSecretFromCall(id string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volumes[id]
	return v != nil && v.locked
}

func (r *Reconciler) begin(id string, step Step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	v.running, v.since, v.progress = step, time.Now(), ""
	switch {
	case step.Action == Look && v.unseen:
		r.adopting[id] = true
	case step.Action != Look && !step.atTarget():
		v.deviceSeen = time.Time{}
	}
}

func (r *Reconciler) end(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	v.running, v.since, v.progress, v.span = Step{}, time.Time{}, "", trace.SpanContext{}
}

// progress notes how far the running step is.
func (r *Reconciler) progress(id, words string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.volume(id).progress = words
}
