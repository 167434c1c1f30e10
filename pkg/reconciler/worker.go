package reconciler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// maxSteps bounds the steps of one pass. The longest way through the planner
// has a dozen steps and a few for each target.
const maxSteps = 1000

// pass is one run of a volume's worker: observe, plan, answer the callers, do one
// step, and again until nothing more can be done now.
type pass struct {
	r       *Reconciler
	id      string
	waiters []*waiter              // those armed before the record was read
	failed  map[state.Part]failure // steps of this pass
	steps   int
	claims  int                 // formats that found the device claimed
	mounted map[state.Part]bool // by steps of this pass
	repairs map[restored]bool   // made in this pass
	done    doneSteps
	logger  klog.Logger // of the last step done, which has its trace
	last    earlier     // than the last step that succeeded
	seen    *earlier    // last, while something of it may be taken over; else nil
	trace   *passTrace  // nil: nothing is traced
}

// restored is a step that has restored what was accepted, and the revision of its intent.
type restored struct {
	step   Step
	intent uint64
}

// failure is a failed step and the intent that it was made for.
type failure struct {
	err    error
	intent uint64
}

// converge brings a volume as close to its desired state as is possible now. The
// queue runs at most one converge for each volume at a time.
func (r *Reconciler) converge(ctx context.Context, id string) {
	jobs := r.runJobs(ctx, id)
	p := &pass{r: r, id: id, failed: map[state.Part]failure{}, trace: r.newTrace()}
	defer p.traceEnd()
	for ctx.Err() == nil && p.advance(ctx) {
	}
	// Callers that were answered go on before what is left to do here. gRPC's writer gives way
	// once, too, before it writes an answer.
	runtime.Gosched()
	runtime.Gosched()
	if len(p.done) > 0 {
		p.logger.V(2).Info("Steps done", "steps", p.done)
	}
	if ctx.Err() == nil {
		p.retryLater()
		for _, j := range jobs {
			close(j.ended)
		}
	}
}

// advance observes once and does at most one step. It reports whether it should be
// called again.
func (p *pass) advance(ctx context.Context) bool {
	p.join(p.r.armed(p.id))
	want := p.asked()
	if want == nil {
		want = &state.Volume{ID: p.id}
		p.answer(ctx, want, Plan{})
		p.r.observed(p.id, want, &state.Actual{}, Plan{}, time.Time{})
		return false
	}
	p.r.begin(p.id, Step{Action: Look})
	began, prior := time.Now(), p.seen
	p.seen = nil
	have, at, err := p.r.lookAgain(ctx, want, prior)
	p.r.end(p.id)
	if ctx.Err() != nil {
		return false // the plugin stops, and Ensure tells the callers
	}
	p.traceLook(began, err)
	if err != nil {
		for _, part := range want.Parts() {
			p.fail(want, part, err)
		}
		klog.FromContext(ctx).Error(err, "Volume cannot be observed")
		p.r.unobserved(p.id, want)
		p.answer(ctx, want, Plan{})
		return false
	}
	anothers := p.r.anothersNumber(want, have)
	if anothers != nil && p.failure(want, state.StagePart()) == nil {
		err := errors.Join(anothers, p.r.giveBack(ctx, want, have))
		klog.FromContext(ctx).Error(err, "Device given back")
		p.fail(want, state.StagePart(), err)
		return true
	}
	p.noteProof(have)
	if p.retire(ctx, want) {
		return true
	}
	plan := makePlan(want, have).plan
	if anothers != nil { // it could not be given back
		plan.withhold(want, anothers)
	}
	p.tracePlan(plan)
	p.r.observed(p.id, want, have, plan, at)
	p.failBroken(want, have, plan)
	if p.settle(ctx, want, have, plan, at) {
		return true
	}
	step, ok := p.next(ctx, want, plan)
	if !ok {
		return false
	}
	if p.step(ctx, step, want, have) {
		p.last = earlier{want, have, step, at}
		p.seen = &p.last
	}
	return true
}

// asked returns the volume's record, with CallerWaits of the intents that callers wait for;
// nil when there is none.
func (p *pass) asked() *state.Volume {
	record := p.r.store.Get(p.id)
	if record == nil || len(p.waiters) == 0 {
		return record
	}
	want := record.Clone()
	for _, w := range p.waiters {
		if intent := want.Intent(w.part); intent != nil && intent.Revision == w.intent {
			intent.CallerWaits = true
		}
	}
	return want
}

// join takes in the waiters. A new waiter is answered neither by a step that failed
// before it came, which is tried again, nor by what was observed before.
func (p *pass) join(waiters []*waiter) {
	for _, w := range waiters {
		if !slices.Contains(p.waiters, w) {
			maps.DeleteFunc(p.failed, func(part state.Part, _ failure) bool { return w.needs(part) })
			p.seen, p.repairs = nil, nil
		}
	}
	p.waiters = waiters
}

// next returns the first step of the plan of which nothing has failed in this pass or
// is backing off. A caller ends the back-off of what is done together with what he waits for.
func (p *pass) next(ctx context.Context, want *state.Volume, plan Plan) (Step, bool) {
	for _, step := range plan.Steps {
		parts := together(want, plan, step)
		if len(parts) > 1 && slices.ContainsFunc(p.waiters, func(w *waiter) bool { return slices.ContainsFunc(parts, w.needs) }) {
			p.r.endBackOff(p.id, parts)
		}
		waits := func(part state.Part) bool { return p.failure(want, part) != nil || !p.r.due(p.id, part) }
		if !slices.ContainsFunc(parts, waits) && p.mayRepair(ctx, want, plan, step, parts) {
			return step, true
		}
	}
	return Step{}, false
}

// failBroken fails the parts that the plan takes down because what this pass has mounted there does
// not work. It would be mounted anew on and on.
func (p *pass) failBroken(want *state.Volume, have *state.Actual, plan Plan) {
	if p.mounted == nil {
		return
	}
	for _, step := range plan.Steps {
		if !takesDown(want, step) {
			continue
		}
		for _, part := range together(want, plan, step) {
			if p.mounted[part] && isCorrupt(have, part) {
				p.fail(want, part, state.Errorf(state.Unavailable, "volume %s: %s: what was just mounted there does not work: see the kernel's log", p.id, part))
			}
		}
	}
}

// takesDown reports whether a step takes down a mount that is to be there.
func takesDown(want *state.Volume, step Step) bool {
	return (step.Action == Unbind || step.Action == Unmount) && !want.Intent(step.Part).Gone
}

// futile returns why a step is not made: a former one changed nothing, or was undone.
func (p *pass) futile(step Step, want *state.Volume, have *state.Actual) error {
	p.steps++
	intent := revision(want, step.Part)
	switch {
	case step == p.last.step && intent == revision(p.last.want, step.Part) && reflect.DeepEqual(have, p.last.have):
		return fmt.Errorf("volume %s: step %s reported success and changed nothing", p.id, step)
	case p.repairs[restored{step, intent}]:
		return state.Errorf(state.Unavailable, "volume %s: step %s has just restored what was lost, and it is lost again: something on the node undoes it, and has to be stopped", p.id, step)
	case p.steps > maxSteps:
		return fmt.Errorf("volume %s: step %s: more than %d steps in one pass: something undoes them", p.id, step, maxSteps)
	}
	return nil
}

// step runs one step, and reports whether it succeeded.
func (p *pass) step(ctx context.Context, step Step, want *state.Volume, have *state.Actual) bool {
	if err := p.futile(step, want, have); err != nil {
		p.fail(want, step.Part, err)
		return false
	}
	if current, err := p.noteBegun(step, want, have); err != nil {
		p.fail(want, step.Part, err)
		return false
	} else if !current {
		return false
	}
	p.r.begin(p.id, step)
	if source := have.Lowest(); (step.Action == Format || step.Action == CreateLayer) && p.last.step.Action == BeginFormat && source.Number == p.last.have.Lowest().Number {
		proved := *have
		source.Fresh = true // the step that set the mark has just proved it blank
		setLowest(&proved, source)
		have = &proved
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	intent := revision(want, step.Part)
	stepCtx := state.WithProgress(ctx, func(words string) {
		p.r.progress(p.id, words)
		if revision(p.r.store.Get(p.id), step.Part) != intent {
			stop() // a superseded intent needs no more reading
		}
	})
	stepCtx, span := p.traceStep(stepCtx, step, want)
	run := p.r.run
	if step.Action == Erase && step.Layer == "" && p.last.step.Action == BeginFormat {
		run = p.r.leaveData
	}
	named, start := p.r.secrets.get(p.id), time.Now()
	err := run(stepCtx, step, want, have)
	took := time.Since(start)
	endSpan(span, err)
	p.r.end(p.id)
	if err != nil {
		if step.Action == Format || step.Action == CreateLayer {
			p.last = earlier{} // mkfs may have written, so the device is not proved blank any more
		}
		if p.formatsAgain(step, err) {
			return false
		}
		p.fail(want, step.Part, err)
		if state.ClassOf(err) == state.Unauthenticated && named.Equal(p.r.secrets.get(p.id)) {
			p.r.noteSecretRefused(p.id)
		}
		return false
	}
	if step.Action == Mount || step.Action == MountSource || step.Action == Bind {
		if p.mounted == nil {
			p.mounted = map[state.Part]bool{}
		}
		p.mounted[step.Part] = true
	}
	if part := want.Intent(step.Part); part != nil && part.Accepted && slices.Contains(stepsThatRestore, step.Action) {
		if p.repairs == nil {
			p.repairs = map[restored]bool{}
		}
		p.repairs[restored{step, intent}] = true
	}
	p.done, p.logger = append(p.done, doneStep{step, took}), klog.FromContext(stepCtx)
	return true
}

// stepsThatRestore, of what is accepted, are made once in a pass: then it would be lost again.
var stepsThatRestore = []Action{Attach, OpenLayer, Mount, MountSource, SetAttributes, Bind}

// isCorrupt reports whether what is mounted for a part does not work.
func isCorrupt(have *state.Actual, part state.Part) bool {
	at := have.Stage.Mounts
	if part.Kind == state.TargetKind {
		at = have.Targets.At(part.Path).Mounts
	}
	return len(at) > 0 && at[0].Corrupt
}

// claimTries is how often a format is made once more in a pass because somebody had claimed
// the device.
const claimTries = 3

// formatsAgain reports whether a failed format is made again at once, and counts that: from its
// proof on, after an observation, which waits for the end of a claim that is one for a moment. Such
// a claim can be this process's own, which a program that was forked meanwhile keeps until its exec.
func (p *pass) formatsAgain(step Step, err error) bool {
	if step.Action != Format || !errors.Is(err, unix.EBUSY) || p.claims == claimTries {
		return false
	}
	p.claims++
	return true
}

// noteProof notes on a device that takes its mark late that the last step has proved it blank.
func (p *pass) noteProof(have *state.Actual) {
	if p.last.step.Action != BeginFormat {
		return
	}
	source, was := have.Lowest(), p.last.have.Lowest()
	if !source.Noted || source.Formatting || !source.Attached() || source.Number != was.Number || source.Identity != was.Identity {
		return
	}
	source.Proved = true
	setLowest(have, source)
}

// setLowest replaces the source in what was observed, whose slices others may share.
func setLowest(have *state.Actual, source state.Device) {
	if len(have.Lower) == 0 {
		have.Device = source
		return
	}
	have.Lower = slices.Clone(have.Lower)
	have.Lower[0].Device = source
}

// doneSteps are the steps of a pass that succeeded. They are one line of the log.
type doneSteps []doneStep

type doneStep struct {
	step Step
	took time.Duration
}

// MarshalLog makes klog print the String.
func (d doneSteps) MarshalLog() any { return d.String() }

func (d doneSteps) String() string {
	words := make([]string, len(d))
	for i, done := range d {
		words[i] = done.step.String() + " in " + done.took.String()
	}
	return strings.Join(words, ", ")
}

// revision returns the revision of a part's intent; 0 if there is none.
func revision(v *state.Volume, part state.Part) uint64 {
	if v == nil || v.Intent(part) == nil {
		return 0
	}
	return v.Intent(part).Revision
}

// noteBegun records that steps are made for a part, before the first one; with that the
// intent itself is written. It reports whether the intent is still current: one that was
// superseded before it was begun leaves nothing to undo. Nor does a step on a device that it
// finds attached. What a target is to be mounted from is noted, too: it may be another by the next look.
func (p *pass) noteBegun(step Step, want *state.Volume, have *state.Actual) (current bool, err error) {
	intent := want.Intent(step.Part)
	from := step.Action == MountSource && !want.Targets[step.Part.Path].From.Remembers(have.Source)
	if !from && (slices.Contains(stepsWithoutUndo, step.Action) || intent == nil || intent.Gone || intent.Accepted || intent.Begun) {
		if err := p.r.store.Flush(p.id); err != nil {
			return false, fmt.Errorf("volume %s: writing the record: %w", p.id, err)
		}
		return true, nil
	}
	_, err = p.r.store.Edit(p.id, func(v *state.Volume) error {
		if now := v.Intent(step.Part); now != nil && now.Revision == intent.Revision {
			now.Begun, current = true, true
			if from {
				v.Targets[step.Part.Path].From = seenSource(have.Source)
			}
		}
		return nil
	})
	if err != nil {
		return false, fmt.Errorf("volume %s: writing the record: %w", p.id, err)
	}
	return current, nil
}

// stepsWithoutUndo holds the steps after which there is nothing to undo but what was there before.
var stepsWithoutUndo = []Action{Choose, Adopt, CreateVolume, DetachView, GrowDevice}

func (p *pass) fail(want *state.Volume, part state.Part, err error) {
	p.failed[part] = failure{err: err, intent: revision(want, part)}
}

// failure returns why a step for the part failed in this pass, for its current intent.
func (p *pass) failure(want *state.Volume, part state.Part) error {
	if f := p.failed[part]; f.intent == revision(want, part) {
		return f.err
	}
	return nil
}

// reason returns why a part is not settled and not under way: its own failure,
// what the planner says of it, or the reason of a part that it needs.
func (p *pass) reason(want *state.Volume, plan Plan, part state.Part) error {
	v := plan.Verdicts.Of(part)
	if err := p.failure(want, part); err != nil && !v.Settled {
		return err
	}
	if v.Problem != (Problem{}) {
		return state.Errorf(v.Problem.Class, "volume %s: %s: %s", p.id, part, strings.TrimPrefix(v.Problem.Text, "volume "+p.id+": "))
	}
	for _, need := range v.Needs {
		if err := p.reason(want, plan, need); err != nil {
			return fmt.Errorf("%s waits for %s: %w", part, need, err)
		}
	}
	return nil
}

// settle brings the record up to date with what was seen: it drops tombstones that
// hold, accepts intents that hold and withdraws refused ones. Then it answers the
// callers. It reports whether another observation is needed.
func (p *pass) settle(ctx context.Context, want *state.Volume, have *state.Actual, plan Plan, at time.Time) bool {
	var edits map[state.Part]func(*state.Volume)
	edit := func(part state.Part, f func(*state.Volume)) {
		if edits == nil {
			edits = map[state.Part]func(*state.Volume){}
		}
		edits[part] = f
	}
	for _, part := range want.Parts() {
		intent, seen := want.Intent(part), plan.Verdicts.Of(part).Settled
		switch {
		case seen && intent.Gone:
			edit(part, func(v *state.Volume) { v.Drop(part) })
		case seen && !intent.Accepted, seen && intent.Unconfirmed && callerWaits(want, part):
			edit(part, func(v *state.Volume) { accept(v, part, have) })
		case seen && part.Kind == state.StageKind && remembersLess(want.Stage, have): // it could not be read before, or the stage was adopted
			edit(part, func(v *state.Volume) { remember(v.Stage, have) })
		case seen && part.Kind == state.TargetKind && have.Source != nil && !want.Targets[part.Path].From.Remembers(have.Source):
			edit(part, func(v *state.Volume) { v.Targets[part.Path].From = seenSource(have.Source) })
		case !seen && !intent.Gone && !intent.Accepted && p.refused(want, plan, part):
			edit(part, func(v *state.Volume) { v.Withdraw(part, time.Now()) })
		}
	}
	if len(edits) == 0 {
		p.answer(ctx, want, plan)
		return false
	}
	all := func(v *state.Volume) error {
		stays := sameStage(v, want)                          // otherwise the targets show another stage
		for _, part := range slices.Backward(want.Parts()) { // a stage is accepted before a target is withdrawn
			edit, intent := edits[part], v.Intent(part)
			if edit != nil && intent != nil && intent.Revision == want.Intent(part).Revision && (stays || part.Kind != state.TargetKind || intent.Gone) {
				edit(v)
			}
		}
		return nil
	}
	record, err := p.r.store.Edit(p.id, func(v *state.Volume) error { return p.r.waits.during(v, all) })
	if err != nil {
		klog.FromContext(ctx).Error(err, "Record cannot be brought up to date")
		for part := range edits {
			p.fail(want, part, fmt.Errorf("volume %s: writing the record: %w", p.id, err))
		}
		p.answer(ctx, want, Plan{})
		return false
	}
	if have.Lowest().State == state.DeviceAbsent {
		p.r.left.end(p.id)
	}
	p.r.observed(p.id, record, have, makePlan(record, have).plan, at) // plan does not know the intents that have just taken over
	p.waitForUndo(want, plan, record)
	p.rememberEnds(want, plan)
	p.answer(ctx, want, plan)
	next := false
	for part := range edits {
		if want.Latest(part) != want.Intent(part) { // it gives way to the next intent
			delete(p.failed, part)
			next = true
		}
	}
	// If there is no step to make and no refusal to undo, the pass is over. A request
	// that came meanwhile has queued the volume again.
	return next || len(plan.Steps) > 0 || !plan.settled()
}

// sameStage reports whether two records have the same stage intent, by its revision.
func sameStage(a, b *state.Volume) bool {
	if a.Stage == nil || b.Stage == nil {
		return a.Stage == b.Stage
	}
	return a.Stage.Revision == b.Stage.Revision && a.Stage.Gone == b.Stage.Gone
}

// remember notes the identity of a stage's device and the UUID of its file system,
// unless they are noted already.
func remember(s *state.Stage, have *state.Actual) {
	s.UUID, s.Identity = cmp.Or(s.UUID, have.Contents.UUID), cmp.Or(s.Identity, have.Device.Identity)
}

// remembersLess reports whether remember has something to note.
func remembersLess(s *state.Stage, have *state.Actual) bool {
	return s.UUID == "" && have.Contents.UUID != "" || s.Identity == "" && have.Device.Identity != ""
}

// accept notes that a part holds, and whether a caller waits for it. For a stage it
// also notes the device and the file system, for a block target the device that it shows, and for the
// target of a volume without a device from what it is mounted.
func accept(v *state.Volume, part state.Part, have *state.Actual) {
	switch t := v.Targets[part.Path]; {
	case part.Kind == state.StageKind:
		remember(v.Stage, have)
	case part.Kind == state.TargetKind && have.Source != nil:
		t.From = seenSource(have.Source)
	case part.Kind != state.TargetKind || t.Capability.Access != state.BlockAccess:
	case needsView(t, have.Device):
		t.Device = have.View.Number
	default:
		t.Device = have.Device.Number
	}
	v.Accept(part, callerWaits(v, part))
}

func seenSource(s *state.Source) *state.SeenSource {
	return &state.SeenSource{FSType: s.FSType, Source: s.Source}
}

// callerWaits reports whether a caller waits for a part. A caller who publishes waits for
// the stage, too.
func callerWaits(v *state.Volume, part state.Part) bool {
	return v.Intent(part).CallerWaits || part.Kind == state.StageKind && callerNeedsStage(v)
}

// refused reports whether the part failed for good while a caller waits to be told.
func (p *pass) refused(want *state.Volume, plan Plan, part state.Part) bool {
	if p.refusal(want, plan, part) == nil {
		return false
	}
	return slices.ContainsFunc(p.waiters, func(w *waiter) bool { return w.part == part && w.intent == want.Intent(part).Revision })
}

// refusal returns why a part failed for good. As long as the inline volume of a
// publish is not made, every failure is final: the retry starts anew.
func (p *pass) refusal(want *state.Volume, plan Plan, part state.Part) error {
	err := p.reason(want, plan, part)
	if err == nil || state.ClassOf(err).Final() || part.Kind == state.TargetKind && want.Stage.LivesFor(part.Path) && !want.Stage.Gone && !want.Stage.Inline.Made {
		return err
	}
	return nil
}
