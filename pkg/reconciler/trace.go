package reconciler

import (
	"cmp"
	"context"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// The attributes of spans. No span has an error's text: it may quote what a request says.
const (
	VolumeKey    = attribute.Key("csi.volume_id")
	ErrorTypeKey = attribute.Key("error.type") // of OpenTelemetry; the error's class or gRPC code

	partKey      = attribute.Key("csi_node.part")
	stepKey      = attribute.Key("csi_node.step")
	stepLayerKey = attribute.Key("csi_node.layer")
	stepsKey     = attribute.Key("csi_node.plan.steps")
	forKey       = attribute.Key("csi_node.waits_for")
	attemptKey   = attribute.Key("csi_node.attempt")  // counts from 1
	failuresKey  = attribute.Key("csi_node.failures") // in a row
	lossesKey    = attribute.Key("csi_node.losses")   // in a row
	sinceKey     = attribute.Key("csi_node.since")
	untilKey     = attribute.Key("csi_node.until")
)

// callSpan is the span of a call of Ensure.
type callSpan struct {
	span  trace.Span
	since time.Time
}

// traced returns the span of a call, from its context; nil: it is not traced.
func (r *Reconciler) traced(ctx context.Context) *callSpan {
	if r.tracer == nil {
		return nil
	}
	span := trace.SpanFromContext(ctx)
	if !span.SpanContext().IsValid() {
		return nil
	}
	return &callSpan{span, time.Now()}
}

// link adds to a call's span a link to a step that it waits for in another trace.
func (c *callSpan) link(to trace.SpanContext, step Step) {
	if to.IsSampled() {
		c.span.AddLink(trace.Link{SpanContext: to, Attributes: attributesOf(step)})
	}
}

// traceArrival tells the span of a call what the call meets: a step that runs already,
// and failures in a row of what it needs, which is now tried again. The caller holds mu.
func (v *volume) traceArrival(w *waiter) {
	if w.call == nil {
		return
	}
	v.called = w.call.span.SpanContext()
	if !v.since.IsZero() {
		w.call.span.AddEvent("waits for a step that runs", trace.WithAttributes(append(attributesOf(v.running), sinceKey.String(state.Clock(v.since)))...))
		w.call.link(v.span, v.running)
	}
	for part, a := range v.attempts {
		if w.needs(part) {
			w.call.span.AddEvent("tries again", trace.WithAttributes(partKey.String(part.String()), failuresKey.Int(a.failures)))
		}
	}
}

// passTrace holds the spans of a pass. What is done while a call waits is below that
// call's span. What is done unasked is below a span of the pass's own, which is made with
// the first step: looks at a volume at rest leave no trace.
type passTrace struct {
	own trace.Span // nil: none yet

	// The last look and plan.
	began, seen, planned time.Time
	plan                 Plan
	held                 bool // their spans are not made yet
}

// newTrace returns nil if nothing is traced.
func (r *Reconciler) newTrace() *passTrace {
	if r.tracer == nil {
		return nil
	}
	return &passTrace{}
}

// calls returns the calls that wait: first those that need the part, and of them the one
// that waits longest. Calls whose traces are not kept come last.
func (p *pass) calls(part state.Part) []*callSpan {
	var waiting []*waiter
	for _, w := range p.waiters {
		if w.call != nil && !w.answered {
			waiting = append(waiting, w)
		}
	}
	slices.SortFunc(waiting, func(a, b *waiter) int {
		return cmp.Or(trueFirst(a.call.span.IsRecording(), b.call.span.IsRecording()), trueFirst(a.needs(part), b.needs(part)), a.call.since.Compare(b.call.since))
	})
	calls := make([]*callSpan, len(waiting))
	for i, w := range waiting {
		calls[i] = w.call
	}
	return calls
}

func trueFirst(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// traceLook tells of an observation that has just ended.
func (p *pass) traceLook(began time.Time, err error) {
	t := p.trace
	if t == nil {
		return
	}
	t.began, t.seen, t.held = began, time.Now(), false
	if err != nil {
		p.tracePast(p.parent(p.calls(state.Part{}), "reconcile"), "observe", t.began, t.seen, err)
	}
}

// tracePlan tells of the plan that was just made of the observation.
func (p *pass) tracePlan(plan Plan) {
	t := p.trace
	if t == nil {
		return
	}
	t.planned, t.plan, t.held = time.Now(), plan, true
	if calls := p.calls(state.Part{}); t.own != nil || len(calls) > 0 {
		p.tellLook(p.parent(calls, ""))
	}
}

// tellLook makes the spans of the last observation and plan, unless they are made.
func (p *pass) tellLook(parent trace.Span) {
	t := p.trace
	if !t.held {
		return
	}
	t.held = false
	p.tracePast(parent, "observe", t.began, t.seen, nil)
	if !parent.IsRecording() {
		return
	}
	var steps []string
	for _, step := range t.plan.Steps {
		steps = append(steps, step.String())
	}
	_, span := p.r.tracer.Start(trace.ContextWithSpan(context.Background(), parent), "plan", trace.WithTimestamp(t.seen), trace.WithAttributes(stepsKey.StringSlice(steps)))
	for part, verdict := range t.plan.Verdicts.All() {
		about := partKey.String(part.String())
		if verdict.Problem != (Problem{}) {
			span.AddEvent("stuck", trace.WithAttributes(about, ErrorTypeKey.String(verdict.Problem.Class.String())))
		}
		for _, need := range verdict.Needs {
			span.AddEvent("waits", trace.WithAttributes(about, forKey.String(need.String())))
		}
	}
	span.End(trace.WithTimestamp(t.planned))
}

// tracePast makes a span that has ended already.
func (p *pass) tracePast(parent trace.Span, name string, began, ended time.Time, err error) {
	_, span := p.r.tracer.Start(trace.ContextWithSpan(context.Background(), parent), name, trace.WithTimestamp(began))
	endSpan(span, err, trace.WithTimestamp(ended))
}

// parent returns the span of the first call, or the pass's own, which it makes if need be,
// with a name and what it follows.
func (p *pass) parent(calls []*callSpan, name string, follows ...trace.Link) trace.Span {
	if len(calls) > 0 {
		return calls[0].span
	}
	if t := p.trace; t.own == nil {
		_, t.own = p.r.tracer.Start(context.Background(), name, trace.WithTimestamp(t.began), trace.WithAttributes(VolumeKey.String(p.id)), trace.WithLinks(follows...))
	}
	return p.trace.own
}

// traceStep begins the span of a step, which endSpan ends; nil: nothing is traced. The
// calls that wait beside the first are linked to it.
func (p *pass) traceStep(ctx context.Context, step Step, want *state.Volume) (context.Context, trace.Span) {
	if p.trace == nil {
		return ctx, nil
	}
	about, repair, called := p.r.history(p.id, step)
	name, follows := "reconcile", []trace.Link(nil)
	if intent := want.Intent(step.Part); repair {
		name = "repair"
	} else if called.IsSampled() && (intent == nil || intent.Gone || !intent.Accepted) { // what it asked for is not done yet
		follows = []trace.Link{{SpanContext: called}}
	}
	calls := p.calls(step.Part)
	parent := p.parent(calls, name, follows...)
	p.tellLook(parent)
	ctx, span := p.r.tracer.Start(trace.ContextWithSpan(ctx, parent), string(step.Action), trace.WithAttributes(about...))
	for i, other := range calls {
		if i > 0 {
			other.link(span.SpanContext(), step)
		}
	}
	p.r.tracing(p.id, span.SpanContext())
	if sc := span.SpanContext(); sc.IsSampled() {
		ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("trace", sc.TraceID()))
	}
	return ctx, span
}

// endSpan ends a span, which may be nil.
func endSpan(span trace.Span, err error, options ...trace.SpanEndOption) {
	if span == nil {
		return
	}
	if err != nil {
		class := state.ClassOf(err).String()
		span.SetAttributes(ErrorTypeKey.String(class))
		span.SetStatus(codes.Error, class)
	}
	span.End(options...)
}

// traceEnd ends the pass's own span, and tells what is tried again later.
func (p *pass) traceEnd() {
	if p.trace == nil || p.trace.own == nil {
		return
	}
	own := p.trace.own
	p.r.mu.Lock()
	defer p.r.mu.Unlock()
	if v := p.r.volumes[p.id]; v != nil {
		for part, a := range v.attempts {
			own.AddEvent("backs off", trace.WithAttributes(partKey.String(part.String()), failuresKey.Int(a.failures), untilKey.String(state.Clock(a.next))))
		}
	}
	own.End()
}

// history returns what a step's span tells of the step, whether the step is part of a
// repair, and which call last asked for something of the volume.
func (r *Reconciler) history(id string, step Step) (about []attribute.KeyValue, repair bool, called trace.SpanContext) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v, about := r.volume(id), attributesOf(step)
	if a := v.attempts[step.Part]; a != nil {
		about = append(about, attemptKey.Int(a.failures+1))
	}
	if lost := v.repairs[step.Part]; lost != nil && lost.state == repairing {
		about, repair = append(about, lossesKey.Int(lost.losses)), true
	}
	return about, repair, v.called
}

// tracing notes the span of the step that runs.
func (r *Reconciler) tracing(id string, step trace.SpanContext) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.volume(id).span = step
}

func attributesOf(step Step) []attribute.KeyValue {
	all := []attribute.KeyValue{stepKey.String(string(step.Action))}
	if step.Part != (state.Part{}) {
		all = append(all, partKey.String(step.Part.String()))
	}
	if step.Layer != "" {
		all = append(all, stepLayerKey.String(step.Layer))
	}
	return all
}
