package reconciler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// traces is what a test sees of a plugin that traces.
type traces struct {
	*tracetest.SpanRecorder
	provider *sdktrace.TracerProvider
}

// traced restarts the plugin of a test, with tracing.
func (h *harness) traced(options ...sdktrace.TracerProviderOption) *traces {
	recorder := tracetest.NewSpanRecorder()
	provider := sdktrace.NewTracerProvider(append(options, sdktrace.WithSpanProcessor(recorder))...)
	h.tracer = provider.Tracer("test")
	h.restart()
	return &traces{recorder, provider}
}

// call makes a request below a span of the name, as a traced server would.
func (tr *traces) call(h *harness, name string, within time.Duration, r request) <-chan error {
	answer := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), within)
		defer cancel()
		ctx, span := h.tracer.Start(ctx, name)
		err := h.p.r.Ensure(ctx, r.id, r.part, r.edit)
		span.End()
		answer <- err
	}()
	return answer
}

// forget drops the spans until now, also those of a pass whose callers are answered
// and which has not ended yet.
func (tr *traces) forget(h *harness) {
	h.sleep(time.Second)
	tr.Reset()
}

// story tells all spans: each with its parent's name, in the order in which they ended.
func (tr *traces) story() []string {
	var lines []string
	for _, s := range tr.Ended() {
		line := s.Name()
		if p := tr.find(s.Parent().SpanID()); p != nil {
			line = p.Name() + " > " + line
		}
		lines = append(lines, line)
	}
	return lines
}

func (tr *traces) find(id trace.SpanID) sdktrace.ReadOnlySpan {
	for _, s := range tr.Ended() {
		if s.SpanContext().SpanID() == id {
			return s
		}
	}
	return nil
}

// named returns the ended spans of a name.
func (tr *traces) named(name string) []sdktrace.ReadOnlySpan {
	return slices.DeleteFunc(tr.Ended(), func(s sdktrace.ReadOnlySpan) bool { return s.Name() != name })
}

// about tells the attributes of a span, an event or a link.
func about(all []attribute.KeyValue) string {
	var words []string
	for _, a := range all {
		words = append(words, fmt.Sprintf("%s=%s", a.Key, a.Value.String()))
	}
	return strings.Join(words, " ")
}

// below is the story of what was done below a span: each step with the look and the plan before
// it, and a last look.
func below(parent string, steps ...Action) []string {
	look := []string{parent + " > observe", parent + " > plan"}
	var all []string
	for _, step := range steps {
		all = append(append(all, look...), parent+" > "+string(step))
	}
	return append(all, look...)
}

func wantStory(t *testing.T, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Fatalf("the spans are\n\t%s\nwant\n\t%s", strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestStepsAreBelowTheCallThatWaits(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		h.volume("v")
		require.NoError(t, <-tr.call(h, "stage", time.Minute, stage("v")))
		h.sleep(time.Second)
		want := append(below("stage", Attach, BeginFormat, Format, Mount), "stage")
		wantStory(t, tr.story(), want)
		require.NoError(t, <-tr.call(h, "publish", time.Minute, publish("v", 1)))
		h.sleep(time.Second)
		wantStory(t, tr.story(), append(append(want, below("publish", Bind)...), "publish"))
		bind := tr.named("bind")[0]
		if got, want := about(bind.Attributes()), "csi_node.step=bind csi_node.part=target "+targetPath("v", 1); got != want {
			t.Errorf("bind tells %q, want %q", got, want)
		}
		if got, want := about(tr.named("plan")[0].Attributes()), `csi_node.plan.steps=["attach for stage"]`; got != want {
			t.Errorf("plan tells %q, want %q", got, want)
		}
	})
}

// A call is answered by the failure of a step. The plugin's own attempts are traces of their own,
// which lead to the call that asked, and the next call tells that it tries again.
func TestFailedStepIsTracedAndTriedAgain(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		h.formatted("v", "ext4")
		h.k.fail(opMount, "", 2, errBoom)
		h.refuse(<-tr.call(h, "first", time.Minute, stage("v")), state.Unavailable, "boom")
		h.sleep(time.Second) // the plugin tries once more
		require.NoError(t, <-tr.call(h, "second", time.Minute, stage("v")))
		h.sleep(time.Second)
		var mounts []string
		for _, s := range tr.named("mount") {
			mounts = append(mounts, fmt.Sprintf("%s %s %s", tr.find(s.Parent().SpanID()).Name(), s.Status().Description, about(s.Attributes()[2:])))
		}
		wantStory(t, mounts, []string{
			"first Unavailable error.type=Unavailable",
			"reconcile Unavailable csi_node.attempt=2 error.type=Unavailable",
			"second  csi_node.attempt=3",
		})
		first, own, second := tr.named("first")[0], tr.named("reconcile")[0], tr.named("second")[0]
		if links := own.Links(); len(links) != 1 || !links[0].SpanContext.Equal(first.SpanContext()) || own.Parent().IsValid() {
			t.Errorf("the plugin's own attempt is below %v and leads to %v", own.Parent(), links)
		}
		if events := own.Events(); len(events) != 1 || events[0].Name != "backs off" || !strings.Contains(about(events[0].Attributes), "csi_node.part=stage csi_node.failures=2 csi_node.until=") {
			t.Errorf("the plugin's own attempt tells %v", events)
		}
		if events := second.Events(); len(events) != 1 || events[0].Name != "tries again" || about(events[0].Attributes) != "csi_node.part=stage csi_node.failures=2" {
			t.Errorf("the second call tells %v", events)
		}
		for _, s := range tr.Ended() {
			if text := about(s.Attributes()) + s.Status().Description; strings.Contains(text, "boom") || len(s.Events()) > 1 {
				t.Errorf("%s tells %s, %v", s.Name(), text, s.Events())
			}
		}
	})
}

// A repair that nobody waits for is a trace of its own. Looks at what is at rest are none.
func TestRepairIsATraceOfItsOwn(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		tr.forget(h)
		h.wake("v")
		wantStory(t, tr.story(), nil)
		h.tear(targetPath("v", 1))
		wantStory(t, tr.story(), append(below("repair", Bind), "repair"))
		repair := tr.named("repair")[0]
		if repair.Parent().IsValid() || len(repair.Links()) > 0 || about(repair.Attributes()) != "csi.volume_id=v" {
			t.Errorf("the repair is below %v, leads to %v and tells %s", repair.Parent(), repair.Links(), about(repair.Attributes()))
		}
		if got, want := about(tr.named("bind")[0].Attributes()), "csi_node.step=bind csi_node.part=target "+targetPath("v", 1)+" csi_node.losses=1"; got != want {
			t.Errorf("bind tells %q, want %q", got, want)
		}
		h.atRest("v")
	})
}

// A trace tells what a step and a part wait for, and what stands in the way.
func TestTraceTellsOfWaits(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		v := h.away("v")
		first := tr.call(h, "stage", time.Minute, stage("v"))
		h.sleep(time.Second)
		second := tr.call(h, "publish", time.Minute, publish("v", 1))
		h.sleep(time.Second)
		h.come(v)
		h.p.r.DeviceAppeared()
		require.NoError(t, errors.Join(<-first, <-second))
		h.sleep(time.Second)
		if events := tr.named("attach")[0].Events(); len(events) == 0 || events[0].Name != "waits for the device" {
			t.Errorf("attach tells %v", events)
		}
		if !slices.ContainsFunc(tr.named("plan"), tells("waits", "csi_node.part=target "+targetPath("v", 1)+" csi_node.waits_for=stage")) {
			t.Error("no plan tells that the target waits for the stage")
		}
		h.k.with(func() {
			h.k.mounts[targetPath("v", 2)] = []fakeMount{{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}}
		})
		err := <-tr.call(h, "other", time.Minute, publish("v", 2))
		if !slices.ContainsFunc(tr.named("plan"), tells("stuck", "csi_node.part=target "+targetPath("v", 2)+" error.type="+state.ClassOf(err).String())) {
			t.Errorf("no plan tells of %v", err)
		}
	})
}

// tells returns whether a span has an event with these attributes.
func tells(event, attributes string) func(sdktrace.ReadOnlySpan) bool {
	return func(s sdktrace.ReadOnlySpan) bool {
		return slices.ContainsFunc(s.Events(), func(e sdktrace.Event) bool { return e.Name == event && about(e.Attributes) == attributes })
	}
}

// A failed look is told, though nobody waits.
func TestFailedLookIsTraced(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		h.volume("v")
		h.ok(stage("v"))
		tr.forget(h)
		h.k.fail(opFind, "", 1, errBoom)
		h.wake("v")
		wantStory(t, tr.story(), []string{"reconcile > observe", "reconcile"})
		if status := tr.named("observe")[0].Status(); status.Description != "Unavailable" {
			t.Errorf("the look ends with %v", status)
		}
	})
}

// A call that meets a step under way leads to it; what is done once the first call has left
// is below the second.
func TestCallLeadsToTheStepThatItWaitsFor(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		h.volume("v")
		h.k.slow(opFormat, "", 1, time.Minute)
		first := tr.call(h, "first", 20*time.Second, stage("v"))
		h.sleep(10 * time.Second)
		second := tr.call(h, "second", 2*time.Minute, stage("v"))
		h.refuse(<-first, state.DeadlineExceeded)
		require.NoError(t, <-second)
		h.sleep(time.Second)
		format, call := tr.named("format")[0], tr.named("second")[0]
		if tr.find(format.Parent().SpanID()).Name() != "first" {
			t.Error("the format is not below the call for which it began")
		}
		if links := call.Links(); len(links) != 1 || !links[0].SpanContext.Equal(format.SpanContext()) || about(links[0].Attributes) != "csi_node.step=format csi_node.part=stage" {
			t.Errorf("the second call leads to %v", links)
		}
		if events := call.Events(); len(events) != 1 || events[0].Name != "waits for a step that runs" {
			t.Errorf("the second call tells %v", events)
		}
		wantStory(t, tr.story()[len(tr.story())-6:], append(below("second", Mount), "second"))
	})
}

// Of two calls that wait, each has the steps for its own part, and leads to the other's.
func TestEachCallHasItsOwnSteps(t *testing.T) {
	bubble(t, func(h *harness) {
		tr := h.traced()
		h.volume("v")
		h.ok(stage("v"))
		tr.forget(h)
		h.k.slow(opFind, "v", 1, time.Second)
		h.wake("v") // both come during this look
		a := tr.call(h, "a", time.Minute, publish("v", 2))
		h.sleep(time.Millisecond)
		b := tr.call(h, "b", time.Minute, publish("v", 1))
		require.NoError(t, errors.Join(<-a, <-b))
		h.sleep(time.Second)
		binds := map[string]sdktrace.ReadOnlySpan{}
		for _, s := range tr.named("bind") {
			binds[tr.find(s.Parent().SpanID()).Name()] = s
		}
		for call, n := range map[string]int{"a": 2, "b": 1} {
			if s := binds[call]; s == nil || !strings.HasSuffix(about(s.Attributes()), targetPath("v", n)) {
				t.Fatalf("below %s is %v", call, s)
			}
		}
		if links := tr.named("a")[0].Links(); len(links) != 1 || !links[0].SpanContext.Equal(binds["b"].SpanContext()) {
			t.Errorf("a leads to %v", links)
		}
	})
}

// The steps are below a call whose trace is kept, though another waits longer.
func TestStepsAreBelowACallWhoseTraceIsKept(t *testing.T) {
	bubble(t, func(h *harness) {
		keep := map[string]bool{"kept": true}
		tr := h.traced(sdktrace.WithSampler(sdktrace.ParentBased(byName(keep))))
		h.volume("v")
		h.k.slow(opFind, "v", 1, time.Second)
		first := tr.call(h, "dropped", time.Minute, stage("v"))
		h.sleep(time.Millisecond)
		second := tr.call(h, "kept", time.Minute, stage("v"))
		require.NoError(t, errors.Join(<-first, <-second))
		h.sleep(time.Second)
		if got := tr.story(); !slices.Contains(got, "kept > mount") || slices.ContainsFunc(got, func(line string) bool { return !strings.Contains(line, "kept") }) {
			t.Errorf("the spans are %q", got)
		}
	})
}

// byName keeps the traces whose first span has one of these names.
type byName map[string]bool

func (b byName) ShouldSample(p sdktrace.SamplingParameters) sdktrace.SamplingResult {
	if b[p.Name] {
		return sdktrace.SamplingResult{Decision: sdktrace.RecordAndSample}
	}
	return sdktrace.SamplingResult{Decision: sdktrace.Drop}
}

func (byName) Description() string { return "by name" }

// Without a tracer, nothing of it costs memory on a call's way.
func TestTracingOffAllocatesNothing(t *testing.T) {
	r := New(Config{Store: newFakeStore()})
	v := r.volume("v")
	w := &waiter{part: state.StagePart()}
	p := &pass{r: r, id: "v", waiters: []*waiter{w}, failed: map[state.Part]failure{}}
	ctx, want, plan := t.Context(), &state.Volume{ID: "v"}, Plan{Steps: []Step{{Action: Mount, Part: state.StagePart()}}}
	if n := testing.AllocsPerRun(100, func() {
		w.call = r.traced(ctx)
		v.traceArrival(w)
		p.trace = r.newTrace()
		p.traceLook(time.Time{}, nil)
		p.tracePlan(plan)
		_, span := p.traceStep(ctx, plan.Steps[0], want)
		endSpan(span, nil)
		p.traceEnd()
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
