package client

import (
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// advice says what to do after an error of each code.
var advice = map[codes.Code]string{
	codes.Canceled:           "the plugin goes on; repeat the command to join",
	codes.DeadlineExceeded:   "the plugin goes on; repeat the command to join, or give it more time with --timeout",
	codes.Aborted:            "another request for the volume is under way; repeat the command when that is done",
	codes.Unavailable:        "the plugin cannot do it now: put right what it names, if anything, and repeat the command",
	codes.ResourceExhausted:  "make room, then repeat the command",
	codes.InvalidArgument:    "ask for something else",
	codes.NotFound:           "check the volume's id and the path",
	codes.AlreadyExists:      "it exists and differs from what is asked for; ask for the same, or remove it first",
	codes.FailedPrecondition: "put that right, then repeat the command",
	codes.OutOfRange:         "ask for another size",
	codes.Unauthenticated:    "the driver wants other secrets; give them with --secret key=@file",
	codes.PermissionDenied:   "the driver does not allow it; does it want secrets (--secret key=@file)?",
	codes.Unimplemented:      "the driver does not offer this; `volume capabilities` shows what it does",
}

// rpcError is an error of gRPC with an explanation.
type rpcError struct {
	error
	text string
}

func (e *rpcError) Error() string { return e.text }
func (e *rpcError) Unwrap() error { return e.error }

// explain returns an error of gRPC with its code, its message and what to do next. The
// format says what was being done, which comes first.
func explain(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	s, ok := status.FromError(err)
	if !ok {
		return fmt.Errorf(format+": %w", append(args, err)...)
	}
	next, ok := advice[s.Code()]
	if !ok {
		next = "see the plugin's log"
	}
	return &rpcError{err, fmt.Sprintf("%s: %s: %s (%s)", fmt.Sprintf(format, args...), s.Code(), s.Message(), next)}
}

// underWay reports whether the plugin may still be working on a request that failed.
// The codes are those that kubelet treats so.
func underWay(err error) bool {
	switch status.Code(err) {
	case codes.Canceled, codes.DeadlineExceeded, codes.Aborted, codes.Unavailable, codes.ResourceExhausted:
		return true
	}
	return false
}
