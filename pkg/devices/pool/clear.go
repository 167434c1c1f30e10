package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/internal/lease"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// aloneLimit is how long a short open by others is waited for: a helper
	// program keeps every file of this process from its fork to its exec. The
	// kernel wakes nobody when a file is closed, so it is asked every aloneInterval.
	aloneLimit    = 500 * time.Millisecond
	aloneInterval = 5 * time.Millisecond

	clearChunk = 1 << 30 // bytes that are cleared between two looks at ctx
	writeChunk = 1 << 20 // the same where zeros must be written
)

// Clear makes every byte of a volume zero and forgets that it was ever
// formatted or published raw, durably: then it is like a new volume. A thick volume keeps
// its blocks unless some were lost and the pool is full; a thin one gives them back. The
// formatting mark is set meanwhile, so that a volume on which Clear was interrupted is
// erased before it is next mounted.
//
// Nobody else can open the data meanwhile. FailedPrecondition: somebody, such as a loop
// device, has it open, or that is unknown. NotFound: there is no such volume.
func (p *Pool) Clear(ctx context.Context, id string) (err error) {
	unlock, err := p.volumes.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: clear: %w", id, err)
	}
	defer unlock()
	v, err := p.Get(ctx, id)
	if err != nil {
		return err
	}
	f, err := p.openAlone(ctx, id, os.O_RDWR)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	err = p.update(ctx, id, func(v *Volume) error {
		v.Formatting, v.Formatted, v.Raw, v.Fresh = true, "", false, time.Time{}
		return nil
	})
	if err != nil {
		return err
	}
	if err := clearData(ctx, f, v.Provisioning); err != nil {
		return fmt.Errorf("volume %s: clear: %w", id, noRoom(err))
	}
	return p.update(ctx, id, func(v *Volume) (err error) {
		v.Formatting = false
		v.Fresh, err = changedAt(f.Name())
		return err
	})
}

// CheckClosed returns FailedPrecondition when somebody has a volume's data open,
// and NotFound when there is no such volume.
func (p *Pool) CheckClosed(ctx context.Context, id string) error {
	if _, err := p.Get(ctx, id); err != nil {
		return err
	}
	f, err := p.openAlone(ctx, id, os.O_RDONLY)
	if err != nil {
		return err
	}
	return f.Close()
}

// openAlone opens a volume's data with a lease that stands until the file is closed.
func (p *Pool) openAlone(ctx context.Context, id string, mode int) (*os.File, error) {
	path, err := p.DataPath(id)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, mode|unix.O_NOFOLLOW, 0)
	if errors.Is(err, os.ErrNotExist) {
		return nil, state.Errorf(state.NotFound, "volume %s: there is no such volume, or its data is gone: %w", id, err)
	}
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	switch err = takeLease(ctx, f); {
	case err == nil:
		return f, nil
	case errors.Is(err, unix.EAGAIN):
		err = state.Errorf(state.FailedPrecondition, "volume %s: somebody has %s open; `fuser -v %s` and `losetup -j %s` name them", id, path, path, path)
	case ctx.Err() == nil:
		err = state.Errorf(state.FailedPrecondition, "volume %s: whether somebody has %s open cannot be told: %w", id, path, err)
	}
	return nil, errors.Join(err, f.Close())
}

// takeLease takes a lease on an open file, waiting a moment for others.
func takeLease(ctx context.Context, f *os.File) (err error) {
	if !poll.Until(ctx, aloneInterval, aloneLimit, func() bool {
		err = lease.Take(f)
		return !errors.Is(err, unix.EAGAIN)
	}) {
		return cmp.Or(ctx.Err(), err)
	}
	return err
}

// clearData makes all of a file zero, durably.
func clearData(ctx context.Context, f *os.File, how Provisioning) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	makeZero := blockdev.ZeroRange
	if how == Thin {
		makeZero = blockdev.Punch
	}
	for offset := int64(0); offset < info.Size(); offset += clearChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		bytes := min(clearChunk, info.Size()-offset)
		err := makeZero(f, offset, bytes)
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = writeZeros(ctx, f, offset, bytes)
		}
		if errors.Is(err, unix.ENOSPC) { // blocks that were lost: an attach allocates them again, if there is room
			err = blockdev.Punch(f, offset, bytes)
		}
		if err != nil {
			return fmt.Errorf("from byte %d on: %w", offset, err)
		}
	}
	return f.Sync()
}

func writeZeros(ctx context.Context, f *os.File, offset, bytes int64) error {
	zeros := make([]byte, writeChunk)
	for end := offset + bytes; offset < end; offset += writeChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		if _, err := f.WriteAt(zeros[:min(writeChunk, end-offset)], offset); err != nil {
			return err
		}
	}
	return nil
}
