package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// eraseChunk is how many bytes are erased before ctx is checked again.
const eraseChunk = 1 << 30

// Erase makes every byte of a device zero, durably. Where the device can, it keeps its
// blocks. It holds the device O_EXCL meanwhile, and fails if anybody else has claimed it,
// such as a mkfs that outlived its caller. It checks no mark: the caller knows that the
// device holds no data.
//
// FailedPrecondition: the device is read-only.
func (b *Devices) Erase(ctx context.Context, d state.Device) (err error) {
	f, done, err := b.claim(ctx, d, os.O_RDWR)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("erase %s: it is still in use: mounted or claimed, perhaps by a mkfs that has not ended", d.Path)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM), errors.Is(err, unix.EROFS):
		return state.Errorf(state.FailedPrecondition, "erase %s: %w", d.Path, err)
	case err != nil:
		return fmt.Errorf("erase %s: %w", d.Path, err)
	}
	defer done()
	defer func() { err = errors.Join(err, f.Close()) }()
	if readOnly, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET); err != nil || readOnly != 0 {
		return state.Errorf(state.FailedPrecondition, "erase %s: it is read-only (%v)", d.Path, err)
	}
	// The claim is of the number; the caller means the device that it looked at.
	if size, err := f.Seek(0, io.SeekEnd); err != nil || size != d.Size {
		return fmt.Errorf("erase %s: it has %d bytes, and had %d: it is another device by now (%w)", d.Path, size, d.Size, errors.Join(err, unix.ESTALE))
	}
	return Zero(ctx, f, d.Size, func(offset, bytes int64) error { return ZeroRange(f, offset, bytes) })
}

// Zero makes the first bytes of an open device zero, durably, chunk by chunk, and leaves no
// page of the device in the page cache. The caller has claimed the device.
func Zero(ctx context.Context, f *os.File, bytes int64, part func(offset, bytes int64) error) error {
	if err := f.Sync(); err != nil {
		return err
	}
	for offset := int64(0); offset < bytes; offset += eraseChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		state.Progress(ctx, "zeroed %s of %s", state.Tenths(offset, bytes), state.FormatSize(bytes))
		if err := part(offset, min(eraseChunk, bytes-offset)); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil { // of a loop device's file as well
		return err
	}
	return pathError("BLKFLSBUF", f, unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0))
}

// ZeroRange makes a range of a file or a device zero and keeps its blocks, if it
// can; the kernel writes zeros to a device that cannot.
func ZeroRange(f *os.File, offset, bytes int64) error {
	return pathError("zero", f, unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes))
}

// Punch makes a range of a device zero and gives back its blocks, if it can: what
// backs a loop device gets holes.
func Punch(f *os.File, offset, bytes int64) error {
	err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return ZeroRange(f, offset, bytes)
	}
	return pathError("punch", f, err)
}

func pathError(op string, f *os.File, err error) error {
	if err == nil {
		return nil
	}
	return &os.PathError{Op: op, Path: f.Name(), Err: err}
}
