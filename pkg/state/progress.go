package state

import (
	"context"
	"fmt"
	"time"
)

type progressKey struct{}

// WithProgress returns a context in which Progress calls report, which must not
// block.
func WithProgress(ctx context.Context, report func(string)) context.Context {
	return context.WithValue(ctx, progressKey{}, report)
}

// Progress reports how far long work is, for humans. It does nothing if ctx is not
// of WithProgress.
func Progress(ctx context.Context, format string, args ...any) {
	if report, ok := ctx.Value(progressKey{}).(func(string)); ok {
		report(fmt.Sprintf(format, args...))
	}
}

// Clock writes a moment into an error. It stays the same when the call is repeated, as
// the time that has passed since would not: each new text is an event of its own in
// Kubernetes.
func Clock(t time.Time) string { return t.UTC().Format(time.RFC3339) }

// Tenths writes how far something is, in steps of 10 %, for the same reason.
func Tenths(done, total int64) string {
	if total <= 0 {
		return "0 %"
	}
	return fmt.Sprintf("%d %%", int(10*float64(done)/float64(total))*10)
}
