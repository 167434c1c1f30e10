package tracing

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr/funcr"
	"go.opentelemetry.io/otel/attribute"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/test/require"
)

// collector is an exporter in memory.
type collector struct {
	mu      sync.Mutex
	batches []int // how many spans each export brought
	err     error // of each export
	hangs   bool  // each export hangs until its context ends
	shut    bool
}

func (c *collector) ExportSpans(ctx context.Context, spans []sdktrace.ReadOnlySpan) error {
	c.mu.Lock()
	hangs, err := c.hangs, c.err
	c.batches = append(c.batches, len(spans))
	c.mu.Unlock()
	if hangs {
		<-ctx.Done()
		return ctx.Err()
	}
	return err
}

func (c *collector) Shutdown(context.Context) error {
	c.shut = true
	return nil
}

func (c *collector) got() []int {
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.batches)
}

// scene is a queue in virtual time.
type scene struct {
	*collector
	*queue

	writing sync.Mutex
	lines   []string
}

// log is what was logged when all is blocked.
func (s *scene) log() []string {
	synctest.Wait()
	s.writing.Lock()
	defer s.writing.Unlock()
	return slices.Clone(s.lines)
}

func run(t *testing.T, test func(t *testing.T, s *scene)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &scene{collector: &collector{}}
		logger := funcr.New(func(_, line string) {
			s.writing.Lock()
			defer s.writing.Unlock()
			s.lines = append(s.lines, line)
		}, funcr.Options{})
		s.queue = newQueue(logger, s.collector)
		test(t, s)
		require.NoError(t, s.queue.Shutdown(context.Background()))
		if !s.shut {
			t.Error("the exporter was not ended")
		}
	})
}

// end ends n spans, which must take no time.
func (s *scene) end(t *testing.T, n int) {
	t.Helper()
	start := time.Now()
	for range n {
		s.OnEnd(tracetest.SpanStub{Name: "x"}.Snapshot())
	}
	if took := time.Since(start); took != 0 {
		t.Errorf("it took %s", took)
	}
}

func want[T any](t *testing.T, what string, got, want T) {
	t.Helper()
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

func TestSpansAreSentTogether(t *testing.T) {
	run(t, func(t *testing.T, s *scene) {
		s.end(t, 3)
		want(t, "at once", s.got(), []int(nil))
		time.Sleep(gatherTime)
		want(t, "after a while", s.got(), []int{3})
		s.end(t, together+1)
		want(t, "when a batch is full", s.got(), []int{3, together})
		require.NoError(t, s.ForceFlush(t.Context()))
		want(t, "after a flush", s.got(), []int{3, together, 1})
		want(t, "the log", s.log(), []string(nil))
	})
}

func TestShutdownSendsWhatWaits(t *testing.T) {
	run(t, func(t *testing.T, s *scene) {
		s.end(t, together+2)
		require.NoError(t, s.queue.Shutdown(t.Context()))
		want(t, "sent", s.got(), []int{together, 2})
		s.end(t, 1)
		require.NoError(t, s.ForceFlush(t.Context()))
		want(t, "sent after the end", s.got(), []int{together, 2})
	})
}

// A collector that hangs costs spans, and neither who ends spans nor the end of the plugin
// waits for it.
func TestHangingCollectorCostsSpansOnly(t *testing.T) {
	run(t, func(t *testing.T, s *scene) {
		s.hangs = true
		s.end(t, together)
		want(t, "sent", s.got(), []int{together})
		s.end(t, queued+7)
		time.Sleep(exportTime)
		if log := s.log(); len(log) != 1 || !strings.Contains(log[0], fmt.Sprintf(`"spans"=%d`, together+7)) || !strings.Contains(log[0], "deadline exceeded") {
			t.Errorf("the log says %s", log)
		}
		ctx, cancel := context.WithTimeout(t.Context(), flushTime)
		defer cancel()
		start := time.Now()
		require.NoError(t, s.queue.Shutdown(ctx))
		want(t, "the end took", time.Since(start), flushTime)
		if log := s.log(); len(log) != 2 || !strings.Contains(log[1], fmt.Sprintf(`"spans"=%d`, queued)) {
			t.Errorf("the log says %s", log)
		}
	})
}

func TestLostSpansAreToldOnceAMinute(t *testing.T) {
	run(t, func(t *testing.T, s *scene) {
		s.err = errors.New("no such host")
		for range 100 { // 250 seconds
			s.end(t, 1)
			time.Sleep(gatherTime + 500*time.Millisecond)
		}
		want(t, "lines", len(s.log()), 5)
		time.Sleep(time.Hour)
		want(t, "lines an hour later", len(s.log()), 6)
		told := 0
		for _, line := range s.log() {
			var n int
			_, rest, _ := strings.Cut(line, `"spans"=`)
			if _, err := fmt.Sscan(rest, &n); err != nil || !strings.Contains(line, "no such host") {
				t.Errorf("the log says %s (%v)", line, err)
			}
			told += n
		}
		want(t, "told", told, 100)
	})
}

func TestSampling(t *testing.T) {
	for perMillion, between := range map[int][2]int{0: {0, 0}, 500_000: {300, 700}, AllTraces: {1000, 1000}} {
		run(t, func(t *testing.T, s *scene) {
			tr := newTracing(klog.Logger{}, Config{PerMillion: perMillion}, s.queue)
			kept := 0
			for range 1000 {
				_, span := tr.Tracer().Start(t.Context(), "x")
				if span.SpanContext().IsSampled() {
					kept++
				}
			}
			if kept < between[0] || kept > between[1] {
				t.Errorf("of 1000 with a rate of %d, %d are kept", perMillion, kept)
			}
		})
	}
}

// Whoever calls with a trace has decided on it already, whatever the rate.
func TestSamplingOfACallersTrace(t *testing.T) {
	for flags, perMillion := range map[trace.TraceFlags]int{trace.FlagsSampled: 0, 0: AllTraces} {
		tr := newTracing(klog.Logger{}, Config{PerMillion: perMillion}, tracetest.NewSpanRecorder())
		caller := trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace.TraceID{1}, SpanID: trace.SpanID{1}, TraceFlags: flags, Remote: true})
		_, span := tr.Tracer().Start(trace.ContextWithSpanContext(t.Context(), caller), "x")
		want(t, fmt.Sprintf("kept at a rate of %d", perMillion), span.SpanContext().IsSampled(), flags.IsSampled())
	}
}

func TestAttributesAreBounded(t *testing.T) {
	recorder := tracetest.NewSpanRecorder()
	tr := newTracing(klog.Logger{}, Config{PerMillion: AllTraces}, recorder)
	_, span := tr.Tracer().Start(t.Context(), "x")
	span.SetAttributes(attribute.String("k", strings.Repeat("x", longest+1)))
	span.End()
	want(t, "bytes", len(recorder.Ended()[0].Attributes()[0].Value.AsString()), longest)
}

func TestCheckEndpoint(t *testing.T) {
	for endpoint, good := range map[string]bool{
		"localhost:4317": true, "[::1]:4317": true, "otel.example.com:4317": true, "unix:///run/otel.sock": true,
		"": false, "localhost": false, ":4317": false, "localhost:": false, "http://localhost:4317": false, "unix://otel.sock": false,
	} {
		if err := CheckEndpoint(endpoint); (err == nil) != good {
			t.Errorf("%q: %v", endpoint, err)
		}
	}
}

func TestNoTracing(t *testing.T) {
	var none *Tracing
	if none.Tracer() != nil {
		t.Error("there is a tracer")
	}
	none.Stop()
}
