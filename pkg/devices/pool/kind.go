package pool

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Name is the name of this backend in volume contexts, records and ids.
const Name = "pool"

// Kind returns the backend that keeps volumes as files in a directory of the node.
func Kind() devices.Kind {
	o := &options{}
	return devices.Kind{
		Name: Name, Properties: devices.Properties{NodeLocal: true, CapacityTracked: true, Inline: true},
		Flags: o.flags, Open: o.open,
	}
}

// options are the backend's flags.
type options struct {
	dir          string
	requireMount bool
	// What is kept of the pool: amounts as parseAmount reads them; empty: none.
	reserve, inlineSize, inlineTotal string
}

func (o *options) flags(f *pflag.FlagSet) {
	f.StringVar(&o.dir, "pool-dir", "/var/lib/csi-node/pool", "directory of the volumes' files; made if it was never seen before")
	f.BoolVar(&o.requireMount, "pool-require-mount", false, "make a pool only where a disk is mounted at --pool-dir, so that none is made on the root disk before that")
	f.StringVar(&o.reserve, "pool-reserve", "1Gi,5%", "of the pool's file system, given to no volume: a quantity, a percentage, or both with a comma, of which the larger counts; 0: none")
	f.StringVar(&o.inlineSize, "inline-max-size", "0", "largest inline ephemeral volume, such as 10Gi or 5% of the pool's file system; 0: no limit but the pool's")
	f.StringVar(&o.inlineTotal, "inline-max-total", "0", "most that all inline ephemeral volumes of the node have together, likewise")
}

// limits reads what is kept of the pool.
func (o *options) limits() (l limits, err error) {
	for _, f := range []struct {
		name, text string
		to         *amount
	}{
		{"--pool-reserve", o.reserve, &l.Reserve}, {"--inline-max-size", o.inlineSize, &l.InlineSize}, {"--inline-max-total", o.inlineTotal, &l.InlineTotal},
	} {
		if *f.to, err = parseAmount(f.text); err != nil {
			return l, state.Errorf(state.InvalidArgument, "%s %q: %w", f.name, f.text, err)
		}
	}
	return l, nil
}

const (
	// startTime bounds how long a start waits for the pool's disk, each time it asks.
	startTime = 5 * time.Second
	// atOnce is the limit of a call that is not waited for.
	atOnce = time.Nanosecond
)

// open opens the pool and locks it. A pool that was seen before and is away, whose marker is
// damaged, or whose disk does not answer is served all the same: what stands of its volumes can
// be taken down, Kubernetes is told that there is no room, pods are told why they wait, and all
// goes on when the pool is back.
func (o *options) open(ctx context.Context, env devices.Environment) (devices.Backend, error) {
	most, err := o.limits()
	if err != nil {
		return nil, err
	}
	if !filepath.IsAbs(o.dir) {
		return nil, state.Errorf(state.InvalidArgument, "--pool-dir %q: must be an absolute path", o.dir)
	}
	if env.ObserveOnly {
		p, err := openReadOnly(o.dir)
		if err != nil {
			return nil, err
		}
		return NewBackend(ctx, p, env.Loops)
	}
	if o.requireMount {
		if err := mountedOrKnown(o.dir); err != nil {
			return nil, fmt.Errorf("--pool-dir %s: %w", o.dir, err)
		}
	}
	p, absent, err := o.openPool(ctx)
	if err != nil {
		return nil, fmt.Errorf("--pool-dir %s: %w", o.dir, err)
	}
	p.limits = most
	unlock, err := p.Lock(env.StateDir)
	if err != nil {
		return nil, fmt.Errorf("--pool-dir %s: %w", o.dir, err)
	}
	b, err := NewBackend(ctx, p, env.Loops)
	if err != nil {
		return nil, errors.Join(err, unlock())
	}
	b.unlock = unlock
	if absent != nil {
		klog.FromContext(ctx).Error(absent, "Serving without the pool until it is there", "pool", o.dir)
	}
	return b, nil
}

// openPool opens the pool. If that can be used only once it is back, absent says why: it is
// away, or its disk does not answer; what is left in that one is removed when it does.
func (o *options) openPool(ctx context.Context) (p *Pool, absent, err error) {
	var opening hang.Calls[*Pool]
	open := func() (*Pool, error) { return Open(o.dir) }
	p, err = opening.Do(ctx, o.dir, startTime, open)
	if hangs(err) || errors.Is(err, errAbsent) {
		away, unseen := openAbsent(o.dir)
		switch {
		case unseen == nil && hangs(err):
			o.sweep(ctx, atOnce, func() (*Pool, error) { return opening.Do(ctx, o.dir, hang.NoLimit, open) })
			return away, err, nil
		case unseen == nil:
			return away, err, nil
		case hangs(err): // it was not seen before, and has no volumes
			p, err = opening.Do(ctx, o.dir, hang.NoLimit, open)
		default:
			err = unseen
		}
	}
	if err != nil {
		return nil, nil, err
	}
	o.sweep(ctx, startTime, func() (*Pool, error) { return p, nil })
	return p, nil, nil
}

// sweep removes what a crash left in the pool that opened returns. If that takes longer than
// the limit, it goes on while the plugin serves.
func (o *options) sweep(ctx context.Context, limit time.Duration, opened func() (*Pool, error)) {
	var sweeping hang.Calls[struct{}]
	_, err := sweeping.Do(ctx, o.dir, limit, func() (struct{}, error) {
		p, err := opened()
		if err == nil {
			p.sweep(ctx)
		} else if ctx.Err() == nil {
			klog.FromContext(ctx).Error(err, "What interrupted creations and deletions have left in the pool stays until the next start", "pool", o.dir)
		}
		return struct{}{}, nil
	})
	if hangs(err) {
		klog.FromContext(ctx).Info("What interrupted creations and deletions have left in the pool is removed while the plugin serves", "pool", o.dir)
	}
}

// hangs reports whether an error is that of a call which was left behind.
func hangs(err error) bool { return errors.As(err, new(*hang.Unanswered)) }
