package driver

import (
	"context"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/state"
)

// grpcCodes is the only place where an error class becomes a gRPC code.
var grpcCodes = map[state.Class]codes.Code{
	state.Unavailable:        codes.Unavailable,
	state.DeadlineExceeded:   codes.DeadlineExceeded,
	state.Canceled:           codes.Canceled,
	state.Aborted:            codes.Aborted,
	state.ResourceExhausted:  codes.ResourceExhausted,
	state.InvalidArgument:    codes.InvalidArgument,
	state.NotFound:           codes.NotFound,
	state.AlreadyExists:      codes.AlreadyExists,
	state.FailedPrecondition: codes.FailedPrecondition,
	state.OutOfRange:         codes.OutOfRange,
	state.Unauthenticated:    codes.Unauthenticated,
	state.Unimplemented:      codes.Unimplemented,
	state.Internal:           codes.Internal,
}

// statusCodes turns the class of an error into its gRPC code. Errors that are
// a gRPC status already, such as those of unimplemented RPCs, pass unchanged. One that is
// wrapped, such as that of an array's API, says nothing of the call.
func statusCodes(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err == nil {
		return resp, nil
	}
	if isStatus(err) {
		return nil, err
	}
	message := strings.ReplaceAll(err.Error(), "\n", "; ") // joined errors are on several lines
	return nil, status.Error(grpcCodes[state.ClassOf(err)], short(message, maxMessage))
}

// isStatus reports whether an error is a gRPC status itself: status.FromError finds also one
// that it wraps.
func isStatus(err error) bool {
	_, is := err.(interface{ GRPCStatus() *status.Status })
	return is
}

// ownNameInErrors writes the program's own name into errors that name the engine's program.
func (o Options) ownNameInErrors(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	resp, err := handler(ctx, req)
	if err == nil {
		return resp, nil
	}
	if isStatus(err) { // of a service that the driver's builder added
		return nil, err
	}
	if text := o.inOwnName(err.Error()); text != err.Error() {
		err = state.Errorf(state.ClassOf(err), "%s", text)
	}
	return nil, err
}

// inTime fixes the time by which the call must be answered, before it waits for anything.
func inTime(ctx context.Context, req any, _ *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	return handler(deadline.WithAnswerTime(ctx), req)
}

// streamInterceptor puts a stream, which only a service that the driver's builder added has, behind
// the interceptors of other calls. They see no request.
func streamInterceptor(chain []grpc.UnaryServerInterceptor) grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		call := func(ctx context.Context, _ any) (any, error) {
			return nil, handler(server, contextStream{stream, ctx})
		}
		for _, interceptor := range slices.Backward(chain) {
			next := call
			call = func(ctx context.Context, req any) (any, error) {
				return interceptor(ctx, req, &grpc.UnaryServerInfo{Server: server, FullMethod: info.FullMethod}, next)
			}
		}
		_, err := call(stream.Context(), nil)
		return err
	}
}

// contextStream is a stream with another context.
type contextStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s contextStream) Context() context.Context { return s.ctx }

// maxMessage bounds the message of an answer, in bytes. It may quote a string of
// megabytes from the request, gRPC sends messages as headers, and a caller whose
// headers are too large sees Internal in place of the code. Two paths fit.
const maxMessage = 16 << 10

// maxLogged bounds what the log quotes from a request, in bytes.
const maxLogged = 4 << 10

func short(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// logCalls logs each call without its secrets: failed ones always, others at level 4.
func logCalls(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	logger := klog.FromContext(ctx).WithValues("rpc", path.Base(info.FullMethod))
	if v, ok := req.(interface{ GetVolumeId() string }); ok {
		logger = logger.WithValues("volume", short(v.GetVolumeId(), maxLogged))
	}
	ctx = klog.NewContext(ctx, logger)
	detail := logger.V(4)
	if detail.Enabled() { // else the arguments would be made for nothing
		detail.Info("Called", "request", withoutSecrets{req})
	}
	start := time.Now()
	resp, err := handler(ctx, req)
	if err != nil {
		logger.Error(err, "Call failed", "code", status.Code(err), "took", time.Since(start), "request", withoutSecrets{req})
	} else if detail.Enabled() {
		detail.Info("Call answered", "took", time.Since(start))
	}
	return resp, err
}

// withoutSecrets prints a request without the fields that the CSI spec marks as
// secret, without mount flags, which may hold secrets, and without the pod's tokens,
// which kubelet puts into the volume context.
type withoutSecrets struct{ req any }

func (w withoutSecrets) String() string {
	req := w.req
	if m, ok := req.(proto.Message); ok {
		m = proto.Clone(m)
		if c, ok := m.(interface{ GetVolumeContext() map[string]string }); ok {
			delete(c.GetVolumeContext(), state.TokensKey)
		}
		for _, c := range capabilities(m) {
			if mount := c.GetMount(); mount != nil {
				mount.MountFlags = nil
			}
		}
		req = m
	}
	return short(protosanitizer.StripSecrets(req).String(), maxLogged)
}

func capabilities(m proto.Message) []*csi.VolumeCapability {
	switch r := m.(type) {
	case interface{ GetVolumeCapability() *csi.VolumeCapability }:
		return []*csi.VolumeCapability{r.GetVolumeCapability()}
	case interface {
		GetVolumeCapabilities() []*csi.VolumeCapability
	}:
		return r.GetVolumeCapabilities()
	}
	return nil
}

// MarshalLog makes klog print the String.
func (w withoutSecrets) MarshalLog() any { return w.String() }
