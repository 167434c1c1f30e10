package driver

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/csi-node/csi-node/pkg/state"
)

var stageCall = &grpc.UnaryServerInfo{FullMethod: "/csi.v1.Node/NodeStageVolume"}

// answering returns a handler that answers with err.
func answering(err error) grpc.UnaryHandler {
	return func(context.Context, any) (any, error) { return &csi.NodeStageVolumeResponse{}, err }
}

// A class is named after its code, and every class has one.
func TestEveryClassHasItsCode(t *testing.T) {
	classes := 0
	for class := state.Class(0); !strings.HasPrefix(class.String(), "Class("); class++ {
		classes++
		_, err := statusCodes(t.Context(), nil, stageCall, answering(fmt.Errorf("volume v: %w", state.Errorf(class, "at /x"))))
		s, ok := status.FromError(err)
		if !ok || s.Code().String() != class.String() || s.Message() != "volume v: at /x" || len(s.Details()) > 0 {
			t.Errorf("%s becomes %v", class, err)
		}
	}
	if classes != len(grpcCodes) || classes < 13 {
		t.Errorf("%d classes and %d codes", classes, len(grpcCodes))
	}
}

func TestStatusCodes(t *testing.T) {
	array := status.Error(codes.NotFound, "no such LUN on this path") // of an API that speaks gRPC
	for title, test := range map[string]struct {
		err  error
		want codes.Code
	}{
		"success":                {nil, codes.OK},
		"unclassified":           {errors.New("no class"), codes.Unavailable},
		"deadline":               {fmt.Errorf("looking: %w", context.DeadlineExceeded), codes.DeadlineExceeded},
		"canceled":               {context.Canceled, codes.Canceled},
		"a status":               {status.Error(codes.Unimplemented, "no such RPC"), codes.Unimplemented},
		"a vendor's":             {fmt.Errorf("volume v: %w", array), codes.Unavailable},
		"a vendor's, classified": {state.Errorf(state.ResourceExhausted, "%w", array), codes.ResourceExhausted},
		"the outermost":          {state.Errorf(state.Unavailable, "%w", state.Errorf(state.NotFound, "x")), codes.Unavailable},
		"beneath a text":         {fmt.Errorf("volume v: %w", state.Errorf(state.OutOfRange, "x")), codes.OutOfRange},
	} {
		t.Run(title, func(t *testing.T) {
			resp, err := statusCodes(t.Context(), nil, stageCall, answering(test.err))
			if s, ok := status.FromError(err); !ok || s.Code() != test.want {
				t.Errorf("becomes %v, not %s", err, test.want)
			}
			if (resp != nil) != (err == nil) {
				t.Errorf("answers %v with %v", resp, err)
			}
		})
	}
}

// A message is one line, as long as a caller takes.
func TestMessagesAreBounded(t *testing.T) {
	for text, want := range map[string]string{
		"words":                                 "words",
		"of two\nparts":                         "of two; parts",
		strings.Repeat("x", maxMessage):         strings.Repeat("x", maxMessage),
		strings.Repeat("x", maxMessage+1):       strings.Repeat("x", maxMessage) + "…",
		strings.Repeat("x", maxMessage-1) + "é": strings.Repeat("x", maxMessage-1) + "…",
	} {
		_, err := statusCodes(t.Context(), nil, stageCall, answering(state.Errorf(state.InvalidArgument, "%s", text)))
		if s := status.Convert(err); s.Code() != codes.InvalidArgument || s.Message() != want {
			t.Errorf("%d bytes become %d: %.40q", len(text), len(s.Message()), s.Message())
		}
	}
}

// logging returns a context whose logger writes into the text.
func logging(t *testing.T, level int) (context.Context, *strings.Builder) {
	var text strings.Builder
	logger := textlogger.NewLogger(textlogger.NewConfig(textlogger.Verbosity(level), textlogger.Output(&text)))
	return klog.NewContext(t.Context(), logger), &text
}

func TestLogsKeepNoSecrets(t *testing.T) {
	secrets := map[string]string{"key": "s3cret"}
	volume := map[string]string{"plain": "visible", "csi.storage.k8s.io/serviceAccount.tokens": "s3cret"}
	flags := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{MountFlags: []string{"key=s3cret"}}}}
	for _, req := range []proto.Message{
		&csi.NodeStageVolumeRequest{VolumeId: "v", Secrets: secrets, VolumeContext: volume, VolumeCapability: flags},
		&csi.NodePublishVolumeRequest{VolumeId: "v", Secrets: secrets, VolumeContext: volume},
		&csi.NodeExpandVolumeRequest{VolumeId: "v", VolumePath: "/visible", Secrets: secrets},
		&csi.CreateVolumeRequest{Name: "visible", Secrets: secrets, VolumeCapabilities: []*csi.VolumeCapability{flags}},
		&csi.ValidateVolumeCapabilitiesRequest{VolumeId: "v", Secrets: secrets, VolumeContext: volume},
	} {
		for _, fails := range []error{nil, errors.New("failed")} {
			before := proto.Clone(req)
			ctx, text := logging(t, 4)
			var passed any
			_, err := logCalls(ctx, req, stageCall, func(_ context.Context, req any) (any, error) { passed = req; return nil, fails })
			if err != fails || passed != any(req) || !proto.Equal(req, before) {
				t.Errorf("%T: the call is changed: %v (%v)", req, passed, err)
			}
			if strings.Contains(text.String(), "s3cret") || !strings.Contains(text.String(), "visible") {
				t.Errorf("%T: the log is\n%s", req, text)
			}
		}
	}
}

func TestLogCalls(t *testing.T) {
	req := &csi.NodeStageVolumeRequest{VolumeId: "pvc-1"}
	for title, test := range map[string]struct {
		level int
		err   error
		want  []string // in the log; none: it is empty
	}{
		"success, quiet": {level: 2},
		"success":        {level: 4, want: []string{"Called", "Call answered", "NodeStageVolume", "pvc-1"}},
		"failure, quiet": {level: 0, err: status.Error(codes.NotFound, "none"), want: []string{"Call failed", "NodeStageVolume", "pvc-1", "NotFound", "none"}},
	} {
		t.Run(title, func(t *testing.T) {
			ctx, text := logging(t, test.level)
			if _, err := logCalls(ctx, req, stageCall, answering(test.err)); !errors.Is(err, test.err) {
				t.Errorf("the error becomes %v", err)
			}
			if len(test.want) == 0 && text.Len() > 0 {
				t.Errorf("the log is\n%s", text)
			}
			for _, words := range test.want {
				if !strings.Contains(text.String(), words) {
					t.Errorf("no %q in\n%s", words, text)
				}
			}
		})
	}
	// The log of the handler names the volume of the call.
	ctx, text := logging(t, 2)
	if _, err := logCalls(ctx, req, stageCall, func(ctx context.Context, _ any) (any, error) {
		klog.FromContext(ctx).Info("within")
		return nil, nil
	}); err != nil || !strings.Contains(text.String(), "pvc-1") {
		t.Errorf("the log is %q (%v)", text, err)
	}
}
