package pool

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Grow makes a volume at least that many bytes large (rounded up to blockSize).
// It never shrinks one. A growth that was interrupted is completed by the next.
//
// NotFound: there is no such volume. ResourceExhausted: there is no room.
// OutOfRange: larger than a file can be. FailedPrecondition: the data is
// shorter than the volume, which growing would hide.
func (p *Pool) Grow(ctx context.Context, id string, bytes int64) error {
	bytes, err := roundUp(bytes)
	if err != nil {
		return fmt.Errorf("volume %s: grow: %w", id, err)
	}
	unlock, err := p.volumes.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: grow: %w", id, err)
	}
	defer unlock()
	v, err := p.Get(ctx, id)
	if err != nil {
		return err
	}
	if v.Bytes >= bytes {
		return p.settle(ctx, id)
	}
	// The file first: a file longer than its facts say is harmless.
	if err := p.growData(ctx, v, bytes); err != nil {
		return fmt.Errorf("volume %s: grow: %w", id, err)
	}
	return p.update(ctx, id, func(v *Volume) error { v.Bytes = bytes; return nil })
}

func (p *Pool) growData(ctx context.Context, v Volume, bytes int64) (err error) {
	f, err := os.OpenFile(p.path(volumesDir, v.ID, dataFile), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if info.Size() < v.Bytes {
		return state.Errorf(state.FailedPrecondition, "%s has %d bytes, %d fewer than the volume: it was truncated; restore it from a backup", f.Name(), info.Size(), v.Bytes-info.Size())
	}
	if err := p.extend(ctx, f, v, bytes); err != nil {
		return err
	}
	return wrap(f.Sync(), "fsync %s", f.Name())
}
