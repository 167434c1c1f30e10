// Package hang makes calls that may never return: questions to a file system whose disk or
// server is dead, to a device, or to storage that is away. Such a call cannot be cancelled,
// only left behind. Whoever waits for it is answered in time. Of the calls with one key
// only one runs at a time, so that calls that hang do not pile up.
package hang

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Calls are calls that may never return, each with a key. At most one of a key
// runs at a time; calls of different keys do not wait for each other. The zero
// value is ready.
type Calls[T any] struct {
	mu      sync.Mutex
	running map[string]*call[T]
}

// call is one that runs, or has returned.
type call[T any] struct {
	since time.Time
	done  chan struct{} // closed when it has returned, and value and err are set
	value T
	err   error
}

// Unanswered is the error of a call that was given up, and that still runs.
type Unanswered struct {
	// Since is when the call began.
	Since time.Time
	// Earlier says that another caller made it, and that this one's was not made.
	Earlier bool

	cause error
}

// Error tells since when the call has been running, in the same words each time.
func (e *Unanswered) Error() string {
	return fmt.Sprintf("no answer since %s: %v", e.Since.UTC().Format(time.RFC3339), e.cause)
}

// Unwrap returns the error of the context, or context.DeadlineExceeded if the
// limit was reached.
func (e *Unanswered) Unwrap() error { return e.cause }

// NoLimit is the limit of a call whose wait only the context ends.
const NoLimit time.Duration = 0

// Do makes a call, once no other with its key runs, and returns what it returns. It
// does not wait longer than ctx, nor for a call that has been running for the limit:
// the error is an *Unanswered then, which is not wrapped, and the call, if it
// was made, goes on.
func (c *Calls[T]) Do(ctx context.Context, key string, limit time.Duration, do func() (T, error)) (T, error) {
	for {
		if value, own, err := c.Join(ctx, key, limit, do); own || isUnanswered(err) {
			return value, err
		}
	}
}

// Join makes a call, or waits for one with its key that runs. It returns what that
// returns, and whether it was the caller's own; errors are those of Do.
func (c *Calls[T]) Join(ctx context.Context, key string, limit time.Duration, do func() (T, error)) (value T, own bool, err error) {
	running, own := c.begin(key, do)
	var late <-chan time.Time
	if limit != NoLimit {
		timer := time.NewTimer(limit - time.Since(running.since)) // at once for one that hangs
		defer timer.Stop()
		late = timer.C
	}
	cause := context.DeadlineExceeded
	select {
	case <-running.done:
		return running.value, own, running.err
	case <-late:
	case <-ctx.Done():
		cause = ctx.Err()
	}
	select {
	case <-running.done: // it has just returned
		return running.value, own, running.err
	default:
		return value, own, &Unanswered{Since: running.since, Earlier: !own, cause: cause}
	}
}

// begin returns the call that runs with a key, or makes the caller's own.
func (c *Calls[T]) begin(key string, do func() (T, error)) (_ *call[T], own bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if running := c.running[key]; running != nil {
		return running, false
	}
	if c.running == nil {
		c.running = map[string]*call[T]{}
	}
	begun := &call[T]{since: time.Now(), done: make(chan struct{})}
	c.running[key] = begun
	go func() {
		begun.value, begun.err = do()
		c.mu.Lock()
		delete(c.running, key)
		c.mu.Unlock()
		close(begun.done)
	}()
	return begun, true
}

func isUnanswered(err error) bool {
	_, is := err.(*Unanswered) // one that is wrapped is what the call itself returned
	return is
}
