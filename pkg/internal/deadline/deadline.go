// Package deadline says by when a call is answered: a little before its deadline.
package deadline

import (
	"context"
	"time"
)

// margin returns how long before its deadline a call is answered, so that the answer still
// reaches the caller: a tenth of the time that the call has when it begins, two seconds at
// most.
func margin(left time.Duration) time.Duration { return min(left/10, 2*time.Second) }

// answerTimeKey is the key of the answer time in a context.
type answerTimeKey struct{}

// WithAnswerTime sets the moment at which a call is answered at the latest, whatever it
// waits for: its deadline less a margin of the time left now. Without a deadline, or if the
// moment is set already, it returns ctx.
func WithAnswerTime(ctx context.Context) context.Context {
	at, ok := AnswerTime(ctx)
	if !ok || ctx.Value(answerTimeKey{}) != nil {
		return ctx
	}
	return context.WithValue(ctx, answerTimeKey{}, at)
}

// AnswerTime returns when a call must be answered, see WithAnswerTime. A deadline that was set
// since, and comes before that moment, has a margin of the time left now. ok is false if there
// is no deadline.
func AnswerTime(ctx context.Context) (at time.Time, ok bool) {
	end, ok := ctx.Deadline()
	if !ok {
		return at, false
	}
	if at, set := ctx.Value(answerTimeKey{}).(time.Time); set && at.Before(end) {
		return at, true
	}
	return end.Add(-margin(time.Until(end))), true
}

// UntilAnswer returns a context that ends when a call must be answered, or when ctx does.
func UntilAnswer(ctx context.Context) (context.Context, context.CancelFunc) {
	at, ok := AnswerTime(ctx)
	if !ok {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, at)
}
