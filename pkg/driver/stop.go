package driver

import (
	"context"
	"time"

	"google.golang.org/grpc"
)

// stopTimeout bounds the wait, at shutdown, for calls to be answered and for
// steps to end. A step that hangs longer is left to the next start.
const stopTimeout = 10 * time.Second

// endInTime calls f and waits for it, once ctx has ended for stopTimeout at most. It
// reports whether f has ended; else it goes on.
func endInTime(ctx context.Context, f func()) bool {
	ended := make(chan struct{})
	go func() { defer close(ended); f() }()
	select {
	case <-ended:
		return true
	case <-ctx.Done():
	}
	select {
	case <-ended:
		return true
	case <-time.After(stopTimeout):
		return false
	}
}

// stopServer stops accepting calls, and answers those under way. ctx has ended. A handler
// that hangs is left behind after stopTimeout.
func stopServer(ctx context.Context, server *grpc.Server) {
	if !endInTime(ctx, server.GracefulStop) {
		server.Stop()
	}
}
