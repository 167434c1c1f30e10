package loop

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// eraseChunk is how many bytes are erased between two looks at ctx.
const eraseChunk = 1 << 30

// BeginFormat sets the formatting mark in the pool, durably.
func (b *Backend) BeginFormat(ctx context.Context, volume string) error {
	return b.pool.BeginFormat(ctx, volume)
}

// BeginRaw notes in the pool, durably, that the volume is shown raw for writing.
func (b *Backend) BeginRaw(ctx context.Context, volume string) error {
	return b.pool.BeginRaw(ctx, volume)
}

// EndFormat clears the mark and remembers the file system type, durably.
func (b *Backend) EndFormat(ctx context.Context, volume, fsType string) error {
	return b.pool.EndFormat(ctx, volume, fsType)
}

// Erase makes every byte of an attached volume zero, durably: a thick volume
// keeps its blocks, a thin one gives them back. It holds the device O_EXCL
// meanwhile, and fails when anybody else has it claimed, as a mkfs that
// outlived its caller has.
//
// FailedPrecondition: the volume has no formatting mark, so what is on it may
// be data; or it is not attached for writing.
func (b *Backend) Erase(ctx context.Context, volume string) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	v, err := b.pool.Get(ctx, volume)
	if err != nil {
		return err
	}
	d, err := b.own(ctx, volume)
	switch {
	case err != nil:
		return fmt.Errorf("volume %s: erase: %w", volume, err)
	case !v.Formatting:
		return state.Errorf(state.FailedPrecondition, "volume %s: erase: no format was begun that was not ended, so its contents may be data", volume)
	case d == nil || d.readOnly || d.detaching():
		return state.Errorf(state.FailedPrecondition, "volume %s: erase: it is not attached for writing", volume)
	}
	unlock, err := b.nodes.Lock(ctx, d.name)
	if err != nil {
		return err
	}
	defer unlock()
	if err := b.erase(ctx, d, volume, v.Provisioning == pool.Thick); err != nil {
		return fmt.Errorf("volume %s: erase: %w", volume, err)
	}
	return nil
}

// erase goes through the device, so that no page of it survives in a cache.
// fallocate(2) on a block device becomes a WRITE_ZEROES request, for which the
// loop driver punches holes into the file; where the file system cannot, the
// kernel writes zeros. A thick volume's device refuses such requests: its file
// is zeroed, which keeps the blocks, between two flushes of the device.
func (b *Backend) erase(ctx context.Context, d *device, volume string, thick bool) (err error) {
	f, err := open(d.name, os.O_RDWR|unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s is %w: it is mounted or claimed, perhaps by a mkfs that has not ended", d, errHeld)
	}
	if err != nil {
		return err
	}
	defer closeAfter(f, &err)
	now, err := describe(f, d.name)
	switch {
	case err != nil:
		return err
	case now == nil || now.tag() != d.tag() || now.file() != d.file():
		return fmt.Errorf("%s does not show the volume any more", d.path())
	}
	makeZero := func(offset, bytes int64) error { return punch(f, offset, bytes) }
	if thick {
		path, pathErr := b.pool.DataPath(volume)
		if pathErr != nil {
			return pathErr
		}
		data, openErr := openData(path, d.file(), os.O_RDWR)
		if openErr != nil {
			return openErr
		}
		defer closeAfter(data, &err)
		makeZero = func(offset, bytes int64) error { return zero(data, f, offset, bytes) }
	}
	if err := f.Sync(); err != nil {
		return err
	}
	for offset := int64(0); offset < now.bytes; offset += eraseChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := makeZero(offset, min(eraseChunk, now.bytes-offset)); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil { // of the file as well
		return err
	}
	return pathError("BLKFLSBUF", f, unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0))
}

// punch makes a range of a device zero and gives back its blocks, if possible.
func punch(f *os.File, offset, bytes int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		err = unix.Fallocate(int(f.Fd()), zeroRange, offset, bytes)
	}
	return pathError("punch", f, err)
}

// zero makes a range of a file zero and keeps its blocks, in the file if its
// file system can, else through the device.
func zero(data, f *os.File, offset, bytes int64) error {
	err := unix.Fallocate(int(data.Fd()), zeroRange, offset, bytes)
	if !errors.Is(err, unix.EOPNOTSUPP) {
		return pathError("zero", data, err)
	}
	return pathError("zero", f, unix.Fallocate(int(f.Fd()), zeroRange, offset, bytes))
}

const zeroRange = unix.FALLOC_FL_ZERO_RANGE | unix.FALLOC_FL_KEEP_SIZE

func pathError(op string, f *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: f.Name(), Err: err}
}
