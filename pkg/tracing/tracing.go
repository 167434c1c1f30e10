// Package tracing sends spans to a collector, as OTLP over gRPC. Whoever ends a span never
// waits for that: what the collector does not take in time is dropped, and counted in the
// log.
//
// Spans are made with OpenTelemetry's Tracer; nothing here is global. Begin with Start; the
// queue behind it is in queue.go.
package tracing

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"k8s.io/klog/v2"
)

// Config is where spans are sent, and which.
type Config struct {
	Endpoint string // of the collector: host:port, or unix:///path; without TLS
	// PerMillion is how many of a million traces that begin here are kept. A trace that
	// begins elsewhere is kept if it is kept there. It is samplingRatePerMillion of
	// Kubernetes' TracingConfiguration.
	PerMillion int
	// Resource says whose spans they are.
	Resource []attribute.KeyValue
}

// AllTraces is the Config.PerMillion of all traces.
const AllTraces = 1_000_000

// longest is how many bytes of a string are kept in an attribute: enough for a path, and
// for a volume id that is longer than the CSI spec allows.
const longest = 4 << 10

// Tracing makes spans and sends them. Its methods may be called concurrently.
type Tracing struct {
	logger   klog.Logger
	provider *sdktrace.TracerProvider
	tracer   trace.Tracer
}

// CheckEndpoint returns what is wrong with a Config.Endpoint.
func CheckEndpoint(endpoint string) error {
	if path, is := strings.CutPrefix(endpoint, "unix://"); is {
		if !filepath.IsAbs(path) {
			return fmt.Errorf("%q: must have an absolute path, such as unix:///run/otel.sock", endpoint)
		}
		return nil
	}
	if host, port, err := net.SplitHostPort(endpoint); err != nil || host == "" || port == "" || strings.Contains(endpoint, "/") {
		return fmt.Errorf("%q: must be host:port, such as localhost:4317, or unix:///path", endpoint)
	}
	return nil
}

// Start connects to the collector with the first spans, not at once. ctx gives the logger.
func Start(ctx context.Context, cfg Config) (*Tracing, error) {
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(cfg.Endpoint), otlptracegrpc.WithInsecure(), otlptracegrpc.WithTimeout(exportTime))
	if err != nil {
		return nil, err
	}
	logger := klog.FromContext(ctx)
	return newTracing(logger, cfg, newQueue(logger, exporter)), nil
}

func newTracing(logger klog.Logger, cfg Config, processor sdktrace.SpanProcessor) *Tracing {
	limits := sdktrace.NewSpanLimits()
	limits.AttributeValueLengthLimit = longest
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSpanProcessor(processor),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(float64(cfg.PerMillion)/AllTraces))),
		sdktrace.WithResource(resource.NewSchemaless(cfg.Resource...)),
		sdktrace.WithRawSpanLimits(limits),
	)
	return &Tracing{logger, provider, provider.Tracer("github.com/csi-node/csi-node")}
}

// Tracer makes spans; nil if t is.
func (t *Tracing) Tracer() trace.Tracer {
	if t == nil {
		return nil
	}
	return t.tracer
}

// flushTime bounds the wait for the last spans to be sent.
const flushTime = 5 * time.Second

// Stop sends the spans that wait, for flushTime at most, and ends. t may be nil.
func (t *Tracing) Stop() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTime)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.logger.Error(err, "Tracing does not end as it should")
	}
}
