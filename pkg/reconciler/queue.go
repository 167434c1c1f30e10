package reconciler

import (
	"context"
	"sync"
	"time"
)

// keptWorkers is how many idle workers are kept. They are cheaper than new goroutines,
// whose stacks must grow first.
const keptWorkers = 8

// queue is a work queue of volumes. At most one worker runs for a volume at a time; a
// volume that is added meanwhile runs once more. The number of workers is not limited, so
// that a worker that hangs holds up no other volume.
type queue struct {
	mu      sync.Mutex
	work    func(id string) // nil until Run
	ended   bool
	turns   map[string]*turn // of volumes that are at work, or will be
	workers sync.WaitGroup
	idle    int           // workers that wait
	next    chan string   // to one that waits
	closed  chan struct{} // when ended
}

// turn is the queue's state of a volume: it runs, it is to run again, or it is to run later.
type turn struct {
	working, again bool
	later          *time.Timer
	at             time.Time // when later fires
}

func newQueue() *queue {
	return &queue{turns: map[string]*turn{}, next: make(chan string), closed: make(chan struct{})}
}

// Run works until ctx ends. Then it calls ended, and returns when all workers have returned.
func (q *queue) Run(ctx context.Context, work func(id string), ended func()) {
	q.mu.Lock()
	q.work = work
	for id, t := range q.turns {
		if t.again {
			t.again = false
			q.begin(id, t)
		}
	}
	q.mu.Unlock()
	<-ctx.Done()
	ended()
	q.ShutDown()
	q.workers.Wait()
}

// ShutDown keeps new workers from starting.
func (q *queue) ShutDown() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.ended {
		return
	}
	q.ended = true
	close(q.closed)
	for _, t := range q.turns {
		if t.later != nil {
			t.later.Stop()
		}
	}
}

// Add queues a volume. If its worker runs now, it runs once more.
func (q *queue) Add(id string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.add(id)
}

// AddAfter queues a volume after a time, unless it is to run earlier.
func (q *queue) AddAfter(id string, wait time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if wait <= 0 {
		q.add(id)
		return
	}
	t, at := q.turn(id), time.Now().Add(wait)
	if q.ended || t.later != nil && !at.Before(t.at) {
		return
	}
	if t.later != nil {
		t.later.Stop()
	}
	t.at = at
	t.later = time.AfterFunc(wait, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if t.at == at { // else another one has taken its place
			t.later = nil
			q.add(id)
		}
	})
}

// turn returns the entry of a volume, and makes it if there is none. The caller holds mu,
// here and in the functions below.
func (q *queue) turn(id string) *turn {
	t := q.turns[id]
	if t == nil {
		t = &turn{}
		q.turns[id] = t
	}
	return t
}

func (q *queue) add(id string) {
	switch t := q.turn(id); {
	case q.ended:
	case t.working, q.work == nil:
		t.again = true
	default:
		q.begin(id, t)
	}
}

func (q *queue) begin(id string, t *turn) {
	t.working = true
	select {
	case q.next <- id:
	default:
		q.workers.Go(func() { q.serve(id) })
	}
}

// serve is a worker: it runs a volume, then any other that is due.
func (q *queue) serve(id string) {
	for {
		q.work(id)
		if q.done(id) {
			continue
		}
		if !q.wait() {
			return
		}
		select {
		case id = <-q.next:
			q.mu.Lock()
			q.idle--
			q.mu.Unlock()
		case <-q.closed:
			return
		}
	}
}

// done ends a volume's turn. It reports whether it has another one at once.
func (q *queue) done(id string) (again bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	t := q.turns[id]
	again = t.again && !q.ended
	t.working, t.again = again, false
	if !again && t.later == nil {
		delete(q.turns, id)
	}
	return again
}

// wait reports whether a worker is to wait for another volume.
func (q *queue) wait() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.idle >= keptWorkers {
		return false
	}
	q.idle++
	return true
}
