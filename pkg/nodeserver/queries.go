package nodeserver

import (
	"context"
	"maps"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// answerTimeout bounds how long a question about a volume waits for the volume:
// kubelet asks for one volume after the other.
const answerTimeout = 2 * time.Second

// waitTime is how long a call may wait for a volume and still answer in time.
func waitTime(ctx context.Context) time.Duration {
	at, ok := deadline.AnswerTime(ctx)
	if !ok {
		return answerTimeout
	}
	return min(time.Until(at), answerTimeout)
}

// queries asks volumes for NodeGetVolumeStats and NodeGetVolumeHealth. It runs at most one
// look at each volume at a time, and keeps the usage that the last one saw. A volume that
// does not answer occupies one goroutine, and delays no other volume. The zero value is
// ready to use.
type queries struct {
	looks hang.Calls[queryResult] // by volume

	mu        sync.Mutex
	stale     map[string]bool      // by volume at which a look runs: what that sees is not to be kept
	last      map[string]keptUsage // by volume, until it is forgotten
	dropAbove int                  // entries of last, beyond which dropUnknown drops some
}

// queryResult is what a look at a path has seen.
type queryResult struct {
	path  string // empty: no other caller may share it
	began time.Time
	usage []*csi.VolumeUsage
}

// keptUsage is the last usage that was read from a volume. It is the same at all paths.
type keptUsage struct {
	usage []*csi.VolumeUsage
	at    time.Time
}

// noAnswer is the error of a look at a volume that has not ended, or that ended
// with a cause of the class DeadlineExceeded.
type noAnswer struct {
	since time.Time
	cause error
}

func (e noAnswer) Error() string {
	if e.cause != nil {
		return e.cause.Error()
	}
	return "it has not answered a look since " + state.Clock(e.since)
}

// Unwrap gives the error its class.
func (noAnswer) Unwrap() error { return context.DeadlineExceeded }

// ask looks at a volume, or shares a look at the same path that is under way. It
// returns noAnswer when ctx is about to end or a look has run for answerTimeout;
// that look goes on, and what it sees is kept.
func (p *queries) ask(ctx context.Context, id, path string, look func(context.Context) ([]*csi.VolumeUsage, error)) ([]*csi.VolumeUsage, error) {
	waiting, stop := context.WithTimeout(ctx, waitTime(ctx))
	defer stop()
	for {
		seen, own, err := p.looks.Join(waiting, id, answerTimeout, func() (queryResult, error) {
			began := time.Now()
			p.begin(id)
			usage, err := look(context.WithoutCancel(ctx))
			p.end(id, usage, err)
			return queryResult{path, began, usage}, err
		})
		late, is := err.(*hang.Unanswered)
		switch {
		case is && ctx.Err() != nil:
			return nil, ctx.Err()
		case is:
			return nil, noAnswer{since: late.Since}
		case !own && (path == "" || seen.path != path):
			continue
		case state.ClassOf(err) == state.DeadlineExceeded:
			return nil, noAnswer{seen.began, err}
		}
		return seen.usage, err
	}
}

// begin notes that a look at a volume begins, and end what it has seen.
func (p *queries) begin(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stale == nil {
		p.stale, p.last = map[string]bool{}, map[string]keptUsage{}
	}
	p.stale[id] = false
}

func (p *queries) end(id string, usage []*csi.VolumeUsage, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil && usage != nil && !p.stale[id] {
		p.last[id] = keptUsage{usage, time.Now()}
	}
	delete(p.stale, id)
}

// seen returns what the last look at a volume saw.
func (p *queries) seen(id string) (keptUsage, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.last[id]
	return s, ok
}

// forget drops what was seen of a volume, also by a look that is still under way.
func (p *queries) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.last, id)
	if _, runs := p.stale[id]; runs {
		p.stale[id] = true
	}
}

// keptUsages is how many usages are kept without asking whether their volumes exist.
const keptUsages = 64

// dropUnknown drops the usage of volumes that have no record any more: an inline volume
// whose pod is gone ends without a call. It does so only when the number of kept usages
// has doubled.
func (p *queries) dropUnknown(exists func(id string) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.last) <= max(p.dropAbove, keptUsages) {
		return
	}
	maps.DeleteFunc(p.last, func(id string, _ keptUsage) bool { return !exists(id) })
	p.dropAbove = 2 * len(p.last)
}
