package pool

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Check implements devices.Checker: whether the pool is there and this node can
// attach its volumes (else an error of any class), and whether there is room (else
// ResourceExhausted).
func (b *Backend) Check(ctx context.Context) error {
	if err := b.pool.Check(ctx); err != nil {
		return err
	}
	if err := b.loops.Check(ctx); err != nil {
		return err
	}
	capacity, err := b.pool.Capacity(ctx)
	if err != nil {
		return err
	}
	return roomLeft(b.pool.dir, capacity)
}

// roomLeft returns ResourceExhausted when a pool has no room for new volumes,
// and before it has none for what the volumes write.
func roomLeft(dir string, c Capacity) error {
	switch {
	case c.Promised > c.Free, c.Owed > c.Free && c.Free < c.Total/10:
		return state.Errorf(state.ResourceExhausted, "the pool %s has %d of %d bytes free, and its volumes may yet take %d: their writes fail once it is full; delete data or volumes, or enlarge the pool", dir, c.Free, c.Total, c.Owed)
	case c.Available == 0:
		return state.Errorf(state.ResourceExhausted, "the pool %s has no room for new volumes or for growth: %d of %d bytes are free, %d promised to volumes and %d kept free (--pool-reserve)", dir, c.Free, c.Total, c.Promised, c.Kept)
	}
	return nil
}
