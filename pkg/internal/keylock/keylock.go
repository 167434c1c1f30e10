// Package keylock serialises work by key, and never work on different keys.
package keylock

import (
	"context"
	"sync"
)

// Map holds a lock for each key that is in use. Its zero value is ready; its
// methods may be called concurrently.
type Map struct {
	mu    sync.Mutex
	locks map[string]*lock
	spare []*lock // that nobody uses, for the next keys
}

// spareLimit is how many locks are kept for the next keys.
const spareLimit = 16

type lock struct {
	held  chan struct{} // holds a token while the lock is held
	users int           // that hold the lock or wait for it
}

// Lock waits for the lock of key until ctx ends, whose error it returns then.
// The caller ends its turn by calling unlock, once.
func (m *Map) Lock(ctx context.Context, key string) (unlock func(), err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	l := m.join(key)
	select {
	case l.held <- struct{}{}:
		return func() { <-l.held; m.leave(key, l) }, nil
	case <-ctx.Done():
		m.leave(key, l)
		return nil, ctx.Err()
	}
}

func (m *Map) join(key string) *lock {
	m.mu.Lock()
	defer m.mu.Unlock()
	l := m.locks[key]
	if l == nil {
		if m.locks == nil {
			m.locks = map[string]*lock{}
		}
		if last := len(m.spare) - 1; last >= 0 {
			l, m.spare = m.spare[last], m.spare[:last]
		} else {
			l = &lock{held: make(chan struct{}, 1)}
		}
		m.locks[key] = l
	}
	l.users++
	return l
}

func (m *Map) leave(key string, l *lock) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if l.users--; l.users > 0 {
		return
	}
	if delete(m.locks, key); len(m.spare) < spareLimit {
		m.spare = append(m.spare, l)
	}
}
