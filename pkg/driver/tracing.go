package driver

import (
	"context"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	otelcodes "go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/tracing"
)

// startTracing returns nil if nothing is traced.
func startTracing(ctx context.Context, c Config, version string) (*tracing.Tracing, error) {
	if c.TracingEndpoint == "" {
		return nil, nil
	}
	return tracing.Start(ctx, tracing.Config{
		Endpoint: c.TracingEndpoint, PerMillion: c.TracingPerMillion,
		Resource: []attribute.KeyValue{
			attribute.String("service.name", c.DriverName), attribute.String("service.version", version), attribute.String("k8s.node.name", c.NodeID),
		},
	})
}

// traceCalls makes a span of each call, below that of the caller if it names one in the
// way of the W3C (traceparent). Of the request it has only the volume's id. The log lines
// of a call whose trace is kept have its id.
func traceCalls(tracer trace.Tracer) grpc.UnaryServerInterceptor {
	return func(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
		var caller propagation.TraceContext
		told := propagation.MapCarrier{}
		for _, key := range caller.Fields() {
			if values := metadata.ValueFromIncomingContext(ctx, key); len(values) > 0 {
				told[key] = values[0]
			}
		}
		ctx = caller.Extract(ctx, told)
		method := strings.TrimPrefix(info.FullMethod, "/")
		ctx, span := tracer.Start(ctx, method, trace.WithSpanKind(trace.SpanKindServer),
			trace.WithAttributes(attribute.String("rpc.system.name", "grpc"), attribute.String("rpc.method", method)))
		defer span.End()
		if v, ok := req.(interface{ GetVolumeId() string }); ok {
			span.SetAttributes(reconciler.VolumeKey.String(v.GetVolumeId()))
		}
		if sc := span.SpanContext(); sc.IsSampled() {
			ctx = klog.NewContext(ctx, klog.FromContext(ctx).WithValues("trace", sc.TraceID()))
		}
		resp, err := handler(ctx, req)
		name := code.Code(status.Code(err)).String()
		span.SetAttributes(attribute.String("rpc.response.status_code", name))
		if err != nil {
			span.SetAttributes(reconciler.ErrorTypeKey.String(name))
			span.SetStatus(otelcodes.Error, name)
		}
		return resp, err
	}
}
