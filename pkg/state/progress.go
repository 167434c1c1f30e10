package state

import (
	"context"
	"fmt"
)

type progressKey struct{}

// WithProgress returns a context in which Progress hands its words to told,
// which must not block.
func WithProgress(ctx context.Context, told func(string)) context.Context {
	return context.WithValue(ctx, progressKey{}, told)
}

// Progress tells who waits for long work how far it has come, for humans. It
// does nothing where nobody asked by WithProgress.
func Progress(ctx context.Context, format string, args ...any) {
	if told, ok := ctx.Value(progressKey{}).(func(string)); ok {
		told(fmt.Sprintf(format, args...))
	}
}
