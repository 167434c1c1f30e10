package driver

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/report"
)

// needs is what the plugin needs to make and mount volumes: the probes and the metrics ask
// whether it is there, and share one round of checks.
type needs struct {
	checks []func(context.Context) error // of everything that may go missing while the plugin runs
	looks  hang.Calls[struct{}]
	lacked atomic.Bool // something was missing in the last round that ended
}

func (p *plugin) newNeeds() *needs {
	return &needs{checks: []func(context.Context) error{
		p.defaultStorage(),
		func(context.Context) error { return p.lacks() },
	}}
}

// lacks returns what is missing whatever disks are there: programs, loop devices.
func (p *plugin) lacks() error { return errors.Join(p.filesystem.CheckPrograms(), p.loops.Check()) }

// checkTime bounds the checks. A check that hangs on a dead disk is no reason to
// restart the plugin: that would kill the helper programs that work on other disks.
const checkTime = 3 * time.Second

// missing returns what is missing. Concurrent callers share one round of checks.
func (n *needs) missing(ctx context.Context) error {
	err := n.look(ctx, checkTime)
	_, late := err.(*hang.Unanswered)
	switch {
	case !late:
		return err
	case ctx.Err() != nil:
		return ctx.Err()
	}
	klog.FromContext(ctx).Info("A check of the plugin's needs does not end", "waited", checkTime)
	return nil
}

// ready tells whether anything is missing, and waits for measureWait at most. Until a round has ended, or
// has taken checkTime, the last one counts.
func (n *needs) ready() bool {
	err := n.look(context.Background(), measureWait)
	if late, is := err.(*hang.Unanswered); is {
		return time.Since(late.Since) >= checkTime || !n.lacked.Load()
	}
	return err == nil
}

// look waits for a round of checks, for so long at most, and returns what is missing. The
// error is a *hang.Unanswered if the round goes on.
func (n *needs) look(ctx context.Context, wait time.Duration) error {
	waiting, stop := context.WithTimeout(ctx, wait)
	defer stop()
	_, _, err := n.looks.Join(waiting, "", hang.NoLimit, func() (_ struct{}, err error) {
		defer func() { n.lacked.Store(err != nil) }()
		for _, check := range n.checks {
			if err := check(context.WithoutCancel(ctx)); err != nil {
				return struct{}{}, err
			}
		}
		return struct{}{}, nil
	})
	return err
}

// defaultStorage checks whether the default backend can serve volumes. Roll-outs
// wait for a plugin that is not ready. So what another backend lacks does not
// count here: its volumes and NodeGetStorageHealth report it.
func (p *plugin) defaultStorage() func(context.Context) error {
	place, ok := p.backends[0].Backend.(devices.Checker)
	return func(ctx context.Context) error {
		if !ok {
			return nil
		}
		if err := place.Check(ctx); !report.Serves(err) {
			return err
		}
		return nil
	}
}

// storageTime bounds the check of each backend.
const storageTime = 5 * time.Second

// storage returns what is wrong with the places of the backends. They are asked at the same
// time, and one that does not answer is named.
func (p *plugin) storage(ctx context.Context) []report.Finding {
	return p.checkStorage(ctx, storageTime, 0)
}

// storageProblems is storage for a report, which waits for placesWait. A backend that has
// not answered by then is named only if its check has been running for storageTime.
func (p *plugin) storageProblems() []report.StorageProblem {
	return report.StorageProblems(p.checkStorage(context.Background(), placesWait, storageTime))
}

// checkStorage waits for the check of each backend, and reports those whose check has been
// running for longer than silence. A check that hangs goes on, and the next caller joins
// it.
func (p *plugin) checkStorage(ctx context.Context, wait, silence time.Duration) []report.Finding {
	ctx, stop := context.WithTimeout(ctx, wait)
	defer stop()
	errs := make([]error, len(p.backends))
	var asked sync.WaitGroup
	for i, b := range p.backends {
		place, can := b.Backend.(devices.Checker)
		if !can {
			continue
		}
		asked.Go(func() {
			_, _, err := p.looks.Join(ctx, b.name, hang.NoLimit, func() (struct{}, error) {
				ctx, stop := context.WithTimeout(context.Background(), storageTime)
				defer stop()
				return struct{}{}, place.Check(ctx)
			})
			if late, is := err.(*hang.Unanswered); is {
				if err = nil; i == 0 {
					late = p.longerSilent(late)
				}
				if time.Since(late.Since) >= silence {
					err = fmt.Errorf("the backend %s: %w", b.name, late)
				}
			}
			errs[i] = err
		})
	}
	asked.Wait()
	return report.StorageHealth(errs)
}

// longerSilent returns the check of the default backend that has hung longer: the one that
// is given, or that of the probe `ready`, which kubelet asks again and again.
func (p *plugin) longerSilent(late *hang.Unanswered) *hang.Unanswered {
	if p.needs == nil { // no plugin runs
		return late
	}
	if probe, is := p.needs.look(context.Background(), 0).(*hang.Unanswered); is && probe.Since.Before(late.Since) {
		return probe
	}
	return late
}
