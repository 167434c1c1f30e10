package reconciler

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// worked counts how often each volume's worker began, and lets the workers of some wait.
type worked struct {
	mu     sync.Mutex
	begun  map[string]int
	atWork map[string]int
	holds  map[string]chan struct{}
	twice  bool // two workers of one volume were seen
}

func (w *worked) work(id string) {
	w.mu.Lock()
	w.begun[id]++
	w.atWork[id]++
	w.twice = w.twice || w.atWork[id] > 1
	hold := w.holds[id]
	w.mu.Unlock()
	if hold != nil {
		<-hold
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.atWork[id]--
}

// hold lets the worker of a volume wait for a channel.
func (w *worked) hold(id string, until chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.holds[id] = until
}

// atWork runs a queue until the test's function returns.
func atWork(t *testing.T, test func(q *queue, w *worked)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		w := &worked{begun: map[string]int{}, atWork: map[string]int{}, holds: map[string]chan struct{}{}}
		q, stopped := newQueue(), false
		ctx, cancel := context.WithCancel(t.Context())
		q.Add("before the start")
		done := make(chan struct{})
		go func() { defer close(done); q.Run(ctx, w.work, func() { stopped = true }) }()
		test(q, w)
		cancel()
		<-done
		q.Add("after the end")
		q.AddAfter("after the end", time.Second)
		time.Sleep(time.Hour)
		if w.begun["before the start"] != 1 || w.begun["after the end"] != 0 || !stopped || w.twice {
			t.Errorf("begun: %v; told of the end: %t; two at a time: %t", w.begun, stopped, w.twice)
		}
	})
}

func TestQueue(t *testing.T) {
	t.Run("however many", func(t *testing.T) {
		atWork(t, func(q *queue, w *worked) {
			hold := make(chan struct{})
			for i := range 3 * keptWorkers {
				w.hold(fmt.Sprint(i), hold)
				q.Add(fmt.Sprint(i))
			}
			synctest.Wait()
			if len(w.begun) != 3*keptWorkers+1 {
				t.Errorf("%d of them have begun", len(w.begun))
			}
			close(hold)
			synctest.Wait()
			if q.idle != keptWorkers || len(q.turns) != 0 {
				t.Errorf("%d workers wait, and %d turns are kept", q.idle, len(q.turns))
			}
			q.Add("next") // to one that waits
			synctest.Wait()
			if w.begun["next"] != 1 || q.idle != keptWorkers {
				t.Errorf("begun %d times; %d workers wait", w.begun["next"], q.idle)
			}
		})
	})
	t.Run("once more", func(t *testing.T) {
		atWork(t, func(q *queue, w *worked) {
			hold := make(chan struct{})
			w.hold("v", hold)
			for range 3 {
				q.Add("v")
				synctest.Wait()
			}
			if w.begun["v"] != 1 {
				t.Errorf("begun %d times", w.begun["v"])
			}
			close(hold)
			synctest.Wait()
			if w.begun["v"] != 2 {
				t.Errorf("begun %d times", w.begun["v"])
			}
		})
	})
	t.Run("later", func(t *testing.T) {
		atWork(t, func(q *queue, w *worked) {
			synctest.Wait()
			want := map[string]int{"before the start": 1}
			for _, wait := range []time.Duration{5 * time.Second, 2 * time.Second, 3 * time.Second} {
				q.AddAfter("v", wait) // the earliest counts
			}
			q.AddAfter("now", 0)
			for second, begun := range []map[string]int{{"now": 1}, {}, {"v": 1}, {}, {}, {}} {
				maps.Copy(want, begun)
				synctest.Wait()
				w.mu.Lock()
				if !maps.Equal(w.begun, want) {
					t.Errorf("after %d s: %v, want %v", second, w.begun, want)
				}
				w.mu.Unlock()
				time.Sleep(time.Second)
			}
		})
	})
}
