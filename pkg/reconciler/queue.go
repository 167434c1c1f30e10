package reconciler

import (
	"context"
	"sync"
	"time"
)

// keptWorkers is how many workers wait for more to do: a new goroutine costs more, as
// its stack must grow first.
const keptWorkers = 8

// queue gives each volume a worker when there is something to do. At most one of a
// volume runs at a time; what is added meanwhile makes it run once more. Volumes do not
// wait for each other, however many there are: a worker that hangs must not take another
// volume's place.
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

// turn is what is known of a volume: it is at work, is to be once more, or later.
type turn struct {
	working, again bool
	later          *time.Timer
	at             time.Time // when later fires
}

func newQueue() *queue {
	return &queue{turns: map[string]*turn{}, next: make(chan string), closed: make(chan struct{})}
}

// Run works until ctx ends, calls ended then, and returns when every worker has.
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

// ShutDown lets no worker begin any more.
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

// Add lets a volume's worker run, once more if it runs.
func (q *queue) Add(id string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.add(id)
}

// AddAfter is Add after a time, unless an earlier one is to come.
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

// turn returns what is known of a volume. The caller holds mu, as that of the functions
// below does.
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

// serve is a worker, which begins with a volume.
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
