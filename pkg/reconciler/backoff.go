package reconciler

import (
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Back-off grows from firstDelay, doubling with each failure in a row, to maxDelay.
const (
	firstDelay = 500 * time.Millisecond
	maxDelay   = 2 * time.Minute
)

// backOff is the pause after so many failures, or losses, in a row: firstDelay,
// doubling to maxDelay.
func backOff(failures int) time.Duration {
	if shift := failures - 1; shift < 10 {
		return min(firstDelay<<shift, maxDelay)
	}
	return maxDelay
}

// jitter shortens d at random, so that volumes that failed together are not all
// tried again together.
func (r *Reconciler) jitter(d time.Duration) time.Duration {
	return time.Duration(float64(d) * (0.8 + 0.2*r.random()))
}

// attempt is the record of a part's failures in a row.
type attempt struct {
	failures int
	next     time.Time // zero: due
	step     bool      // a step failed, and waits until next; else the planner is stuck
	err      error
}

func (v *volume) attempt(part state.Part) *attempt {
	a := v.attempts[part]
	if a == nil {
		a = &attempt{}
		if v.attempts == nil {
			v.attempts = map[state.Part]*attempt{}
		}
		v.attempts[part] = a
	}
	return a
}

// failed notes one more failure of a part: a step failed, or the planner is stuck.
// The caller holds mu.
func (r *Reconciler) failed(v *volume, part state.Part, step bool, err error) {
	a := v.attempt(part)
	a.failures++
	a.step, a.err = step, err
	a.next = time.Now().Add(r.jitter(backOff(a.failures)))
}

// due reports whether steps for the part may run now.
func (r *Reconciler) due(id string, part state.Part) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	a := r.volume(id).attempts[part]
	return a == nil || !a.step || !time.Now().Before(a.next)
}

// endBackOff makes all parts due.
func (r *Reconciler) endBackOff(id string, parts []state.Part) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, part := range parts {
		if a := r.volume(id).attempts[part]; a != nil {
			a.next = time.Time{}
		}
	}
}

// retryLater puts the volume back into the queue if a part of it failed or is stuck.
func (p *pass) retryLater() {
	r := p.r
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(p.id)
	planned, group := v.partsWithSteps()
	p.endAttempts(v, planned)
	p.noteFailures(v)
	for w := range v.waiters {
		if w.intent != 0 && !slices.Contains(p.waiters, w) && !w.answered { // it came after this pass took in its waiters
			v.endBackOff(w)
		}
	}
	v.endRepairs()
	for path := range v.podGoneSince {
		if v.want.Targets[path] == nil {
			delete(v.podGoneSince, path)
		}
	}
	v.rest()
	if wait, ok := v.untilNext(time.Now(), planned, group); ok {
		r.queue.AddAfter(p.id, wait)
		if r.metrics != nil && len(v.attempts) > 0 {
			r.metrics.BackOff()
		}
	} else if r.resync > 0 && !v.want.Empty() {
		r.queue.AddAfter(p.id, r.untilResync(v))
	}
	r.forget(p.id)
}

// partsWithSteps returns the parts for which there are steps, and those of them that are repaired
// together (see together). The caller holds mu, here and in the functions below.
func (v *volume) partsWithSteps() (parts map[state.Part]bool, group []state.Part) {
	parts = map[state.Part]bool{}
	for _, step := range v.plan.Steps {
		all := together(v.want, v.plan, step)
		for _, part := range all {
			parts[part] = true
		}
		if len(all) > 1 {
			group = all // of each such step the same
		}
	}
	return parts, group
}

// endAttempts forgets the failures of parts that need no retry: those that are settled, wait
// for another part or are not repaired.
func (p *pass) endAttempts(v *volume, planned map[state.Part]bool) {
	for part := range v.attempts {
		verdict, lost := v.plan.Verdicts.Of(part), v.repairs[part]
		idle := verdict.Settled || verdict.Problem == (Problem{})
		if planned[part] {
			idle = lost != nil && (lost.state == repairPutOff || lost.state == repairOff)
		}
		if idle && p.failure(v.want, part) == nil {
			delete(v.attempts, part)
		}
	}
}

// noteFailures notes the parts that are stuck, and those of which a step failed in this pass.
func (p *pass) noteFailures(v *volume) {
	for part, verdict := range v.plan.Verdicts.All() {
		if !verdict.Settled && verdict.Problem != (Problem{}) && p.failure(v.want, part) == nil {
			p.r.failed(v, part, false, p.reason(v.want, v.plan, part))
		}
	}
	for part := range p.failed {
		if err := p.failure(v.want, part); err != nil {
			p.r.failed(v, part, true, err)
		}
	}
}

// untilNext returns how long until the first part is due again; those of group are due together
// (see together). A repair that is put off is due only while there is a step for it.
func (v *volume) untilNext(now time.Time, planned map[state.Part]bool, group []state.Part) (wait time.Duration, any bool) {
	first := func(next time.Time) {
		if left := max(next.Sub(now), 0); !any || left < wait {
			wait, any = left, true
		}
	}
	var last time.Time // of the group
	for _, part := range group {
		if a := v.attempts[part]; a != nil && a.step && a.next.After(last) {
			last = a.next
		}
	}
	due := func(part state.Part, next time.Time) {
		if slices.Contains(group, part) && last.After(next) {
			next = last
		}
		first(next)
	}
	for part, a := range v.attempts {
		due(part, a.next)
	}
	for part, r := range v.repairs {
		if r.state == repairPutOff && planned[part] && v.attempts[part] == nil {
			due(part, r.next)
		}
	}
	for _, since := range v.podGoneSince {
		first(since.Add(podGoneGrace))
	}
	return wait, any
}
