package mounts

import (
	"context"
	"fmt"
	"sync"
)

// calls keeps track of the calls, by path, that nobody waits for any more.
// The zero value is ready.
type calls struct {
	mu   sync.Mutex
	lost map[string]<-chan struct{} // closed when the call comes back after all
}

// wait makes a call that may never come back, and waits for it or for ctx. A
// path keeps but one lost call: as long as there is one, no other is made.
func wait[T any](ctx context.Context, c *calls, path string, call func() (T, error)) (T, error) {
	var none T
	for lost := c.find(path); lost != nil; lost = c.find(path) {
		select {
		case <-lost:
		case <-ctx.Done():
			return none, fmt.Errorf("the file system has not answered an earlier look: %w", ctx.Err())
		}
	}
	type result struct {
		value T
		err   error
	}
	answer, done := make(chan result, 1), make(chan struct{})
	go func() {
		v, err := call()
		answer <- result{v, err}
		c.end(path, done)
	}()
	select {
	case r := <-answer:
		return r.value, r.err
	case <-ctx.Done():
		c.lose(path, done)
		return none, fmt.Errorf("the file system does not answer: %w", ctx.Err())
	}
}

func (c *calls) find(path string) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lost[path]
}

func (c *calls) lose(path string, done <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case <-done: // it has just come back
		return
	default:
	}
	if c.lost == nil {
		c.lost = map[string]<-chan struct{}{}
	}
	c.lost[path] = done
}

func (c *calls) end(path string, done chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	close(done)
	if c.lost[path] == done {
		delete(c.lost, path)
	}
}
