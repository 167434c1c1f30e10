package driver

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

const (
	callerTrace = "0af7651916cd43dd8448eb211c80319c"
	callerSpan  = "b7ad6b7169203331"
)

func TestTraceCalls(t *testing.T) {
	for title, test := range map[string]struct {
		caller string // its traceparent; empty: none
		err    error
		want   string // attributes
		below  string // span of the caller
		kept   bool
	}{
		"no caller":           {"", nil, "rpc.response.status_code=OK", "", true},
		"a caller":            {"00-" + callerTrace + "-" + callerSpan + "-01", nil, "rpc.response.status_code=OK", callerSpan, true},
		"one that keeps none": {"00-" + callerTrace + "-" + callerSpan + "-00", nil, "", callerSpan, false},
		"nonsense":            {"00-x", nil, "rpc.response.status_code=OK", "", true},
		"an error":            {"", status.Error(codes.DeadlineExceeded, "s3cret"), "rpc.response.status_code=DEADLINE_EXCEEDED error.type=DEADLINE_EXCEEDED", "", true},
	} {
		t.Run(title, func(t *testing.T) {
			recorder := tracetest.NewSpanRecorder()
			tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(recorder)).Tracer("test")
			var log strings.Builder
			ctx := klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log))))
			if test.caller != "" {
				ctx = metadata.NewIncomingContext(ctx, metadata.Pairs("traceparent", test.caller))
			}
			var inside trace.SpanContext
			req := &csi.NodeStageVolumeRequest{VolumeId: "v", VolumeContext: map[string]string{"k": "s3cret"}, PublishContext: map[string]string{"k": "s3cret"}, Secrets: map[string]string{"k": "s3cret"}}
			_, err := traceCalls(tracer)(ctx, req, stageCall, func(ctx context.Context, _ any) (any, error) {
				inside = trace.SpanContextFromContext(ctx)
				klog.FromContext(ctx).Info("Within")
				return &csi.NodeStageVolumeResponse{}, test.err
			})
			if status.Code(err) != status.Code(test.err) {
				t.Errorf("answers %v", err)
			}
			if named := strings.Contains(log.String(), inside.TraceID().String()); named != test.kept || !inside.IsValid() {
				t.Errorf("the log is %s in the trace %s", log.String(), inside.TraceID())
			}
			ended := recorder.Ended()
			if !test.kept {
				if len(ended) > 0 {
					t.Errorf("it is kept: %v", ended)
				}
				return
			}
			span := ended[0]
			var told []string
			for _, a := range span.Attributes() {
				told = append(told, fmt.Sprintf("%s=%s", a.Key, a.Value.String()))
			}
			want := "rpc.system.name=grpc rpc.method=csi.v1.Node/NodeStageVolume csi.volume_id=v " + test.want
			if got := strings.Join(told, " "); got != want {
				t.Errorf("tells %q, want %q", got, want)
			}
			below := ""
			if span.Parent().IsValid() {
				below = span.Parent().SpanID().String()
			}
			if below != test.below || span.SpanKind() != trace.SpanKindServer || span.Name() != "csi.v1.Node/NodeStageVolume" || (below != "") != (span.SpanContext().TraceID().String() == callerTrace) {
				t.Errorf("%s of kind %s is below %q", span.Name(), span.SpanKind(), below)
			}
			if text := fmt.Sprintf("%+v", tracetest.SpanStubFromReadOnlySpan(span)); strings.Contains(text, "s3cret") {
				t.Errorf("tells what it must not: %s", text)
			}
		})
	}
}

func TestNothingIsTracedUnasked(t *testing.T) {
	tr, err := startTracing(t.Context(), Config{}, "v1")
	if tr != nil || err != nil || tr.Tracer() != nil {
		t.Errorf("traces without an endpoint: %v (%v)", tr, err)
	}
}
