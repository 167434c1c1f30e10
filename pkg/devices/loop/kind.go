package loop

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/spf13/pflag"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// Kind returns the kind "pool": volumes as files of a directory, attached as loop
// devices.
func Kind() devices.Kind {
	var dir, reserve, inlineSize, inlineTotal string
	return devices.Kind{
		Name:       "pool",
		Properties: devices.Properties{NodeLocal: true, CapacityTracked: true, Inline: true},
		Flags: func(f *pflag.FlagSet) {
			f.StringVar(&dir, "pool-dir", "/var/lib/csi-node/pool", "directory of the volumes' files; made if it was never seen before")
			f.StringVar(&reserve, "pool-reserve", "1Gi,5%", "of the pool's file system, given to no volume: a quantity, a percentage, or both with a comma, of which the larger counts; 0: none")
			f.StringVar(&inlineSize, "inline-max-size", "0", "largest inline ephemeral volume, as 10Gi or 5% of the pool's file system; 0: no bound but the pool")
			f.StringVar(&inlineTotal, "inline-max-total", "0", "most that all inline ephemeral volumes of the node have together, likewise")
		},
		Open: func(ctx context.Context, env devices.Environment) (devices.Backend, error) {
			if !filepath.IsAbs(dir) {
				return nil, fmt.Errorf("--pool-dir %q: must be an absolute path", dir)
			}
			var limits pool.Limits
			for _, amount := range []struct {
				flag, text string
				to         *pool.Amount
			}{{"--pool-reserve", reserve, &limits.Reserve}, {"--inline-max-size", inlineSize, &limits.InlineSize}, {"--inline-max-total", inlineTotal, &limits.InlineTotal}} {
				var err error
				if *amount.to, err = pool.ParseAmount(amount.text); err != nil {
					return nil, fmt.Errorf("%s %q: %w", amount.flag, amount.text, err)
				}
			}
			return openPool(ctx, dir, limits, env)
		},
	}
}

func openPool(ctx context.Context, dir string, limits pool.Limits, env devices.Environment) (_ devices.Backend, err error) {
	if env.LookOnly {
		p, err := pool.OpenReadOnly(dir)
		if err != nil {
			return nil, err
		}
		b, err := New(p)
		return opened{Volumes{b}, dir, nil}, err
	}
	p, err := pool.Open(ctx, dir)
	absent := err
	if errors.Is(err, pool.ErrAbsent) {
		p, err = pool.OpenAbsent(dir)
	}
	if err != nil {
		return nil, fmt.Errorf("--pool-dir %s: %w", dir, err)
	}
	p.SetLimits(limits)
	unlock, err := p.Lock(env.StateDir)
	if err != nil {
		return nil, fmt.Errorf("--pool-dir %s: %w", dir, err)
	}
	b, err := New(p)
	if err == nil && absent != nil && len(env.Wanted()) == 0 && !b.Any() {
		err = fmt.Errorf("--pool-dir %s: %w", dir, absent)
	}
	if err != nil {
		return nil, errors.Join(err, unlock())
	}
	if absent != nil {
		klog.FromContext(ctx).Error(absent, "Serving without the pool, so that volumes which stand can be unpublished and unstaged", "pool", dir)
	}
	b.Spare(Numbers(env.Numbers))
	return opened{Volumes{b}, dir, unlock}, nil
}

// opened is the backend of a Kind.
type opened struct {
	Volumes
	dir    string
	unlock func() error // the pool; nil: it is only looked at
}

// Close leaves the pool to others.
func (b opened) Close() error {
	if b.unlock == nil {
		return nil
	}
	return b.unlock()
}

// Attached implements devices.Lister.
func (b opened) Attached(ctx context.Context) ([]devices.Attachment, error) {
	all, err := b.Backend.Attached(ctx)
	var list []devices.Attachment
	for _, a := range all {
		list = append(list, devices.Attachment{Volume: a.Volume, Device: a.Device})
	}
	return list, err
}

// Check implements devices.Checker.
func (b opened) Check(ctx context.Context) error {
	if err := b.pool.Check(ctx); err != nil {
		return err
	}
	if err := b.Backend.Check(ctx); err != nil {
		return err
	}
	c, err := b.pool.Capacity(ctx)
	if err != nil {
		return err
	}
	return roomLeft(b.dir, c)
}

// roomLeft returns ResourceExhausted when a pool has no room for new volumes,
// and before it has none for what the volumes write.
func roomLeft(dir string, c pool.Capacity) error {
	switch {
	case c.Promised > c.Free, c.Owed > c.Free && c.Free < c.Total/10:
		return state.Errorf(state.ResourceExhausted, "the pool %s has %d of %d bytes free, and its volumes may yet take %d: their writes fail once it is full; delete data or volumes, or enlarge the pool", dir, c.Free, c.Total, c.Owed)
	case c.Available == 0:
		return state.Errorf(state.ResourceExhausted, "the pool %s has no room for new volumes or for growth: %d of %d bytes are free, %d promised to volumes and %d kept free (--pool-reserve)", dir, c.Free, c.Total, c.Promised, c.Kept)
	}
	return nil
}

// Measure implements devices.Meter.
func (b opened) Measure(ctx context.Context) ([]devices.Measurement, error) {
	c, err := b.pool.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	return measurements(c), nil
}

func measurements(c pool.Capacity) []devices.Measurement {
	bytes := func(name, help string, value int64) devices.Measurement {
		return devices.Measurement{Name: name + "_bytes", Help: help, Value: float64(value)}
	}
	volumes := func(provisioning string, value int) devices.Measurement {
		return devices.Measurement{Name: "volumes", Help: "Volumes of the pool; the provisioning of one with damaged metadata is unknown.",
			Labels: map[string]string{"provisioning": provisioning}, Value: float64(value)}
	}
	return []devices.Measurement{
		bytes("size", "Size of the pool's file system.", c.Total),
		bytes("free", "What nobody has taken of the pool's file system.", c.Free),
		bytes("available", "What new volumes and growth can be promised.", c.Available),
		bytes("allocated", "What volumes have taken.", c.Allocated),
		bytes("promised", "What volumes were promised and have not taken; more than is free if promises are broken.", c.Promised),
		bytes("owed", "What volumes may yet take; more than is free if the pool is overcommitted.", c.Owed),
		volumes(string(pool.Thick), c.Thick), volumes(string(pool.Thin), c.Thin), volumes("unknown", c.Damaged),
	}
}

// Create, Get, IDs and Capacity are the pool's, for who provisions.

func (b opened) Create(ctx context.Context, v pool.Volume) (pool.Volume, error) {
	return b.pool.Create(ctx, v)
}

func (b opened) Get(ctx context.Context, id string) (pool.Volume, error) { return b.pool.Get(ctx, id) }

func (b opened) IDs(ctx context.Context) ([]string, error) { return b.pool.IDs(ctx) }

func (b opened) Capacity(ctx context.Context) (pool.Capacity, error) { return b.pool.Capacity(ctx) }
