package node

import (
	"context"
	"encoding/hex"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	collectorapi "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	traceapi "go.opentelemetry.io/proto/otlp/trace/v1"

	"github.com/csi-node/csi-node/test/harness"
)

// collector keeps the spans that a plugin sends it.
type collector struct {
	collectorapi.UnimplementedTraceServiceServer
	endpoint string

	mu  sync.Mutex
	all []*traceapi.ResourceSpans
}

// Export implements collectorapi.TraceServiceServer.
func (c *collector) Export(_ context.Context, req *collectorapi.ExportTraceServiceRequest) (*collectorapi.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all = append(c.all, req.GetResourceSpans()...)
	return &collectorapi.ExportTraceServiceResponse{}, nil
}

// startCollector serves a collector until the test ends.
func startCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{endpoint: "unix://" + filepath.Join(t.TempDir(), "otel.sock")}
	listener, err := net.Listen("unix", strings.TrimPrefix(c.endpoint, "unix://"))
	must(t, err)
	server := grpc.NewServer()
	collectorapi.RegisterTraceServiceServer(server, c)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	t.Cleanup(func() {
		server.Stop()
		must(t, <-served)
	})
	return c
}

// text is all that the collector was sent.
func (c *collector) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var b strings.Builder
	for _, r := range c.all {
		b.WriteString(r.String())
	}
	return b.String()
}

// spans returns the spans of a trace.
func (c *collector) spans(traceID string) []*traceapi.Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	var found []*traceapi.Span
	for _, r := range c.all {
		for _, scope := range r.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				if hex.EncodeToString(s.GetTraceId()) == traceID {
					found = append(found, s)
				}
			}
		}
	}
	return found
}

// A call is followed from its caller to the steps that were made for it, and its log lines name
// its trace. The spans come at the latest when the plugin ends.
func TestTraces(t *testing.T) {
	t.Parallel()
	c := startCollector(t)
	p := harness.Start(t, harness.Options{Flags: []string{"--tracing-endpoint", c.endpoint, "--tracing-sampling-rate-per-million", "0"}})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
	const staged, published, caller = "0af7651916cd43dd8448eb211c80319c", "0af7651916cd43dd8448eb211c80319d", "b7ad6b7169203331"
	from := func(trace string) context.Context {
		return metadata.AppendToOutgoingContext(t.Context(), "traceparent", "00-"+trace+"-"+caller+"-01")
	}
	must(t, v.Stage(from(staged)))
	must(t, v.Publish(from(published), v.Target("pod")))
	must(t, v.Unpublish(t.Context(), v.Target("pod"))) // its caller names no trace, and none is kept
	p.Terminate()
	for _, trace := range []struct{ id, call, step string }{{staged, "csi.v1.Node/NodeStageVolume", "mount"}, {published, "csi.v1.Node/NodePublishVolume", "bind"}} {
		spans := c.spans(trace.id)
		at := slices.IndexFunc(spans, func(s *traceapi.Span) bool { return s.GetName() == trace.call })
		if at < 0 {
			t.Fatalf("no %s among %v", trace.call, spans)
		}
		call := spans[at]
		if text := call.String(); hex.EncodeToString(call.GetParentSpanId()) != caller || call.GetKind() != traceapi.Span_SPAN_KIND_SERVER ||
			!strings.Contains(text, v.ID) || !strings.Contains(text, `"OK"`) {
			t.Errorf("the span of the call is %s", text)
		}
		var names []string
		for _, s := range spans {
			names = append(names, s.GetName())
			if s != call && string(s.GetParentSpanId()) != string(call.GetSpanId()) {
				t.Errorf("%s is not below the call", s.GetName())
			}
		}
		for _, name := range []string{"observe", "plan", trace.step} {
			if !slices.Contains(names, name) {
				t.Errorf("below %s there is no %s, but %q", trace.call, name, names)
			}
		}
		for _, line := range []string{`"Call answered"`, `"Step done"`} {
			if log := p.Log.String(); !slices.ContainsFunc(strings.Split(log, "\n"), func(l string) bool { return strings.Contains(l, line) && strings.Contains(l, trace.id) }) {
				t.Errorf("no line %s of the log names the trace", line)
			}
		}
	}
	text := c.text()
	for _, want := range []string{"csi-node.local", "node-1"} {
		if !strings.Contains(text, want) {
			t.Errorf("the collector was not told %s", want)
		}
	}
	if strings.Contains(text, "NodeUnpublishVolume") {
		t.Error("a trace is kept against the rate")
	}
	p.Start(harness.Options{})
	v.End()
}
