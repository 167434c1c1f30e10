package reconciler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// waiter is one caller of Ensure. Reconciler.mu guards all fields but part and call, which
// do not change once it is armed, and bytes and answer, which the worker hands over.
type waiter struct {
	part     state.Part
	intent   uint64 // revision of the intent it waits for; 0 until its edit is made
	gone     bool   // it waits for the removal of its part
	ends     bool   // with its target, the stage of an inline volume is removed too
	undoes   bool   // an earlier intent must be undone first
	refused  error  // the final failure of its request, answered once the undo is seen
	residue  error  // what the removal of the intent ended has left behind
	ended    uint64 // revision of the intent that was removed before this waiter was armed
	answered bool   // its caller has the answer
	bytes    int64  // size of the device when the answer was given
	answer   chan error
	call     *callSpan // nil: it is not traced
}

func (r *Reconciler) register(id string, part state.Part) *waiter {
	w := &waiter{part: part, answer: make(chan error, 1)}
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	if v.waiters == nil {
		v.waiters = map[*waiter]struct{}{}
	}
	v.waiters[w] = struct{}{}
	return w
}

func (r *Reconciler) unregister(id string, w *waiter) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	if delete(v.waiters, w); len(v.waiters) == 0 {
		v.waiters = nil // an empty map keeps its memory
	}
	r.forget(id)
}

// arm allows that the waiter is answered from now on. It ends the back-off of what the caller
// waits for: its part, the stage that a publish needs, the targets that an unstage needs
// gone.
func (r *Reconciler) arm(id string, w *waiter, intent *state.Intent, undoes, ends bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w.intent, w.gone, w.undoes, w.ends = intent.Revision, intent.Gone, undoes, ends
	r.volume(id).traceArrival(w)
	r.volume(id).endBackOff(w)
	if w.needs(state.StagePart()) {
		r.wakeAwaiting(id) // the worker may wait for the device of a stage that was superseded
	}
	r.volume(id).locked = false // the call may have brought the secret
}

// endBackOff ends the back-off of what a waiter waits for.
func (v *volume) endBackOff(w *waiter) {
	for part, a := range v.attempts {
		if w.needs(part) {
			a.next = time.Time{}
		}
	}
}

// needs reports whether what the waiter waits for may depend on the part.
func (w *waiter) needs(part state.Part) bool {
	return part == w.part || part == state.StagePart() && (!w.gone || w.ends) || w.part == state.StagePart() && (w.gone || w.undoes)
}

// waitedFor names an intent for which callers wait.
type waitedFor struct {
	id       string
	part     state.Part
	revision uint64
}

// waitCounts counts the callers who wait for each intent. It has a lock of its own, because
// edits use it while the store runs them. The zero value is ready.
type waitCounts struct {
	mu      sync.Mutex
	waiting map[waitedFor]int
}

// during runs an edit of a record. While it runs, CallerWaits is set for each intent
// of the record that a caller waits for.
func (c *waitCounts) during(v *state.Volume, edit func(*state.Volume) error) error {
	c.mu.Lock()
	marked := map[*state.Intent]bool{}
	for _, part := range v.Parts() {
		for _, intent := range []*state.Intent{v.Intent(part), v.Latest(part)} {
			intent.CallerWaits = c.waiting[waitedFor{v.ID, part, intent.Revision}] > 0
			marked[intent] = true
		}
	}
	c.mu.Unlock()
	defer func() {
		for intent := range marked {
			intent.CallerWaits = false
		}
	}()
	return edit(v)
}

func (c *waitCounts) add(what waitedFor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting == nil {
		c.waiting = map[waitedFor]int{}
	}
	c.waiting[what]++
}

func (c *waitCounts) drop(what waitedFor) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.waiting[what]--; c.waiting[what] <= 0 {
		delete(c.waiting, what)
	}
}

// armed returns the waiters whose edits are made.
func (r *Reconciler) armed(id string) []*waiter {
	r.mu.Lock()
	defer r.mu.Unlock()
	var armed []*waiter
	for w := range r.volume(id).waiters {
		if w.intent != 0 {
			armed = append(armed, w)
		}
	}
	return armed
}

// waitForUndo makes the callers of intents that were just withdrawn wait until the
// tombstone in record is seen to hold. A size has none, so its callers are answered
// after the next observation.
func (p *pass) waitForUndo(want *state.Volume, plan Plan, record *state.Volume) {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	p.waiters = slices.DeleteFunc(p.waiters, func(w *waiter) bool {
		before := want.Intent(w.part)
		if w.refused != nil || before == nil || before.Gone || before.Accepted || before.Revision != w.intent || plan.Verdicts.Of(w.part).Settled {
			return false
		}
		err := p.refusal(want, plan, w.part)
		if err == nil {
			return false
		}
		now := record.Intent(w.part)
		if now != nil && !now.Withdrawn && !now.Accepted {
			return true // superseded before it could be withdrawn; answered after the next observation
		}
		w.refused, w.gone = err, true
		if now != nil {
			w.intent = now.Revision
		}
		return true
	})
}

// rememberEnds keeps what a removal has left behind, for callers whose edit is made and who
// are not armed yet: when they are, the tombstone is gone.
func (p *pass) rememberEnds(want *state.Volume, plan Plan) {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	for w := range p.r.volume(p.id).waiters {
		if intent := want.Intent(w.part); intent != nil && intent.Gone && plan.Verdicts.Of(w.part).Settled {
			w.residue, w.ended = p.reason(want, plan, w.part), intent.Revision
		}
	}
}

// answer answers each waiter, except those whose part is still under way.
func (p *pass) answer(ctx context.Context, want *state.Volume, plan Plan) {
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	for _, w := range p.waiters {
		if err, known := p.outcome(want, plan, w); known && !w.answered {
			w.answered, w.bytes = true, p.r.volume(p.id).have.Device.Size
			w.answer <- err
			klog.FromContext(ctx).V(4).Info("Answered", "part", w.part, "err", err)
		}
	}
}

// outcome returns the answer for a waiter, if there is one yet.
func (p *pass) outcome(want *state.Volume, plan Plan, w *waiter) (error, bool) {
	intent := want.Intent(w.part)
	if next := want.Latest(w.part); next != intent && next.Revision == w.intent && !w.gone { // an earlier intent is being undone
		if err := p.reason(want, plan, w.part); err != nil {
			return state.Errorf(state.Unavailable, "taking back what an earlier request began: %w", err), true
		}
		return nil, false
	}
	if intent == nil && w.refused != nil && want.Stage.LivesFor(w.part.Path) && want.Stage.Gone && !plan.Verdicts.Of(state.StagePart()).Settled { // the stage is undone, too
		intent = &want.Stage.Intent
		w = &waiter{part: state.StagePart(), intent: intent.Revision, gone: true, refused: w.refused}
	}
	switch {
	case intent == nil && w.gone && w.refused == nil && w.ended == w.intent:
		return w.residue, true
	case intent == nil && w.gone:
		return w.refused, true
	case intent == nil || intent.Gone && !w.gone || intent.Revision != w.intent && !intent.Gone: // a later removal serves as well
		return state.Errorf(state.Aborted, "volume %s: %s: superseded by a later request", p.id, w.part), true
	case plan.Verdicts.Of(w.part).Settled && w.refused == nil:
		return p.reason(want, plan, w.part), true
	case plan.Verdicts.Of(w.part).Settled:
		return w.refused, true
	}
	err := p.reason(want, plan, w.part)
	switch {
	case err == nil:
		return nil, false
	case w.refused != nil:
		return state.Errorf(state.Unavailable, "%v; and taking back what was begun fails: %v", w.refused, err), true
	case intent.Accepted && state.ClassOf(err).Final() && w.part.Kind != state.SizeKind:
		// What was accepted stays. A final code would tell a caller who does not know that
		// it was accepted that nothing is there.
		return state.Errorf(state.Unavailable, "%w", err), true
	}
	return err, true
}

// late is the answer to a caller whose time is up.
func (r *Reconciler) late(id string, part state.Part, class state.Class) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	detail := "it waits for its turn"
	a := v.attempts[part]
	if a == nil {
		a = v.attempts[state.StagePart()]
	}
	switch {
	case v.unseen:
		detail = "the volume has not been observed yet since the plugin started"
		if !v.since.IsZero() {
			detail += ": step " + v.step().TellSince()
		}
		class = state.Unavailable
	case !v.since.IsZero():
		detail = "step " + v.step().TellSince()
	case a != nil && a.err != nil:
		detail = fmt.Sprintf("the last attempt failed (%s)", strings.TrimPrefix(a.err.Error(), "volume "+id+": "))
	}
	return state.Errorf(class, "volume %s: %s: %s; the work goes on, ask again", id, part, detail)
}
