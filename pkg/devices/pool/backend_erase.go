package pool

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// Erase makes every byte of an attached volume zero, durably: a thick volume
// keeps its blocks, a thin one gives them back. It holds the device O_EXCL
// meanwhile, and fails when anybody else has it claimed, such as a mkfs that
// outlived its caller.
//
// FailedPrecondition: the volume has no formatting mark, so what is on it may
// be data; or it is not attached for writing.
func (b *Backend) Erase(ctx context.Context, v devices.Volume) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	facts, err := b.pool.Get(ctx, v.ID)
	if err != nil {
		return err
	}
	target, d, err := b.own(ctx, v.ID)
	switch {
	case err != nil:
		return fmt.Errorf("volume %s: erase: %w", v.ID, err)
	case !facts.Formatting:
		return state.Errorf(state.FailedPrecondition, "volume %s: erase: no format was begun that was not ended, so its contents may be data", v.ID)
	case d == nil || d.ReadOnly() || d.Detaching():
		return state.Errorf(state.FailedPrecondition, "volume %s: erase: it is not attached for writing", v.ID)
	}
	err = b.loops.Claim(ctx, d, os.O_RDWR, func(f *os.File) error { return erase(ctx, f, target, d, facts.Provisioning == Thick) })
	return wrap(err, "volume %s: erase", v.ID)
}

// erase goes through the device, so that no page of it survives in a cache.
// fallocate(2) on a block device becomes a WRITE_ZEROES request, for which the
// loop driver punches holes into the file; where the file system cannot, the
// kernel writes zeros. A thick volume's device refuses such requests: its file
// is zeroed, which keeps the blocks, between two flushes of the device.
func erase(ctx context.Context, f *os.File, target loop.Target, d *loop.Device, thick bool) (err error) {
	makeZero := func(offset, bytes int64) error { return blockdev.Punch(f, offset, bytes) }
	if thick {
		data, openErr := loop.OpenFile(target.Path, d.File(), os.O_RDWR)
		if openErr != nil {
			return openErr
		}
		defer func() { err = errors.Join(err, data.Close()) }()
		makeZero = func(offset, bytes int64) error {
			err := blockdev.ZeroRange(data, offset, bytes)
			if errors.Is(err, unix.EOPNOTSUPP) { // by the file's file system
				err = blockdev.ZeroRange(f, offset, bytes)
			}
			if errors.Is(err, unix.ENOSPC) { // blocks that were lost, as in clearData
				err = blockdev.Punch(data, offset, bytes)
			}
			return err
		}
	}
	return blockdev.Zero(ctx, f, d.Bytes(), makeZero)
}
