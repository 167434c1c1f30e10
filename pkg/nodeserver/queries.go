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
	running   map[string]*running  // by volume
	last      map[string]keptUsage // by volume, until it is forgotten
	dropAbove int                  // entries of last, beyond which dropUnknown drops some
}

// queryResult is what a look at a path has seen.
type queryResult struct {
	path  string // empty: no other caller may share it
	began time.Time
	usage []*csi.VolumeUsage
}

// running is a look that runs.
type running struct {
	stale bool // what it sees is not to be kept
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

func age(since time.Time) time.Duration { return time.Since(since).Round(time.Second / 10) }

// ask looks at a volume, or shares a look at the same path that is under way. It
// returns noAnswer when ctx is about to end or a look has run for answerTimeout;
// that look goes on, and what it sees is kept.
func (p *queries) ask(ctx context.Context, id, path string, look func(context.Context) ([]*csi.VolumeUsage, error)) ([]*csi.VolumeUsage, error) {
	waiting, stop := context.WithTimeout(ctx, waitTime(ctx))
	defer stop()
	for {
		seen, own, err := p.looks.Join(waiting, id, answerTimeout, func() (queryResult, error) {
			began := time.Now()
			usage, err := p.run(context.WithoutCancel(ctx), id, look)
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

// run looks at a volume, and keeps what is seen for seen.
func (p *queries) run(ctx context.Context, id string, look func(context.Context) ([]*csi.VolumeUsage, error)) ([]*csi.VolumeUsage, error) {
	begun := p.begin(id)
	usage, err := look(ctx)
	p.end(id, begun, usage, err)
	return usage, err
}

func (p *queries) begin(id string) *running {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.running == nil {
		p.running, p.last = map[string]*running{}, map[string]keptUsage{}
	}
	begun := &running{}
	p.running[id] = begun
	return begun
}

func (p *queries) end(id string, ended *running, usage []*csi.VolumeUsage, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil && usage != nil && !ended.stale {
		p.last[id] = keptUsage{usage, time.Now()}
	}
	delete(p.running, id)
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
	if running := p.running[id]; running != nil {
		running.stale = true
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

// isAskedAt reports whether the volume is to be staged or published at path.
func isAskedAt(v *state.Volume, path string) bool {
	if v == nil {
		return false
	}
	t := v.Targets[path]
	return t != nil && !t.Gone || v.Stage != nil && !v.Stage.Gone && v.Stage.Path == path
}
