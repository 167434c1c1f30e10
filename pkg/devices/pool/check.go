package pool

import (
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/state"
)

// Check implements devices.Checker: whether the pool is there and this node can
// attach its volumes (else an error of any class), and whether there is room (else
// ResourceExhausted).
func (b *Backend) Check(ctx context.Context) error {
	if err := b.pool.Check(ctx); err != nil {
		return err
	}
	if err := b.loops.Check(); err != nil {
		return err
	}
	capacity, err := b.pool.Capacity(ctx)
	if err != nil {
		return err
	}
	if capacity.ReadOnly {
		return fmt.Errorf("pool %s: %s", b.pool.dir, takesNoWrites)
	}
	return roomLeft(b.pool.dir, capacity)
}

// roomLeft returns ResourceExhausted when a pool has no room for new volumes,
// and before it has none for what the volumes write.
func roomLeft(dir string, c Capacity) error {
	switch {
	case c.Promised > c.Free, c.Owed > c.Free && c.Free < c.Total/10:
		return state.Errorf(state.ResourceExhausted, "the pool %s (%s) is nearly full, and its volumes may yet take more than is free: their writes fail then; delete data or volumes, or enlarge the pool", dir, state.FormatSize(c.Total))
	case c.NoFiles:
		return state.Errorf(state.ResourceExhausted, "the pool %s (%s) has no inodes for new volumes (df -i): remove other files from its disk, or make its file system with more (mkfs.ext4 -N)", dir, state.FormatSize(c.Total))
	case c.Available == 0:
		return state.Errorf(state.ResourceExhausted, "the pool %s (%s) has no room for new volumes or for growth, beside what is taken, promised to volumes and kept free (--pool-reserve)", dir, state.FormatSize(c.Total))
	}
	return nil
}
