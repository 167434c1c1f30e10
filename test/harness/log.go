package harness

import (
	"bytes"
	"context"
	"fmt"
	"sync"
)

// Log is what a process has written so far. Its methods may be called concurrently.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
	more chan struct{} // closed at the next write; nil when nobody waits
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.more != nil {
		close(l.more)
		l.more = nil
	}
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Await blocks until the log holds text, or ctx ends.
func (l *Log) Await(ctx context.Context, text string) error {
	for {
		l.mu.Lock()
		if bytes.Contains(l.text.Bytes(), []byte(text)) {
			l.mu.Unlock()
			return nil
		}
		if l.more == nil {
			l.more = make(chan struct{})
		}
		more := l.more
		l.mu.Unlock()
		select {
		case <-more:
		case <-ctx.Done():
			return fmt.Errorf("waiting for %q in the log: %w", text, ctx.Err())
		}
	}
}
