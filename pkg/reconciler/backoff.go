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
