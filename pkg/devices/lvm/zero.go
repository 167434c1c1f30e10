package lvm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
)

// zeroFirst zeroes a volume that still has an earlier tenant's bytes, and then removes
// the tag that says so. The caller has marked its device.
func (b *Backend) zeroFirst(ctx context.Context, at place, d *mapper.Device) error {
	if err := b.zero(ctx, deviceName(at.group, at.volume.name), d, false); err != nil {
		return fmt.Errorf("zero it before its first use: %w", err)
	}
	return b.retag(context.WithoutCancel(ctx), at, func(t *tags) error { t.unzeroed = false; return nil })
}

// zero makes every byte of a device zero, durably. Of a thin volume the blocks are given
// back, so that the pool does not fill.
func (b *Backend) zero(ctx context.Context, device string, d *mapper.Device, thin bool) error {
	return b.zeroAfter(ctx, device, d, thin, func() error { return nil })
}

// zeroAfter is zero, and calls begin right before the first write, when nobody else can claim
// the device. FailedPrecondition: it takes no writes; begin was not called then.
func (b *Backend) zeroAfter(ctx context.Context, device string, d *mapper.Device, thin bool, begin func() error) (err error) {
	f, err := claim(ctx, d, os.O_RDWR)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s is mounted or claimed, perhaps by a mkfs that has not ended: %w", device, err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	switch readOnly, err := unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET); {
	case err != nil:
		return &os.PathError{Op: "BLKROGET", Path: f.Name(), Err: err}
	case readOnly != 0:
		return state.Errorf(state.FailedPrecondition, "%s takes no writes: lvchange --permission rw of the logical volume changes that", device)
	}
	bytes, err := f.Seek(0, io.SeekEnd)
	if err == nil {
		err = begin()
	}
	if err != nil {
		return err
	}
	var part func(offset, bytes int64) error
	if thin {
		part = func(offset, bytes int64) error { return discard(ctx, f, offset, bytes) }
	}
	return blockdev.Zero(ctx, f, bytes, part)
}

// zeroChunk is how many bytes are looked at, and zeroed if they are not, at once.
const zeroChunk = 1 << 20

// discard gives back the blocks of a range of a thin volume, which then reads as zeros,
// and zeroes what still does not: a pool may refuse discards, and gives back whole blocks
// only.
func discard(ctx context.Context, f *os.File, offset, size int64) error {
	area := [2]uint64{uint64(offset), uint64(size)}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&area))); errno != 0 && errno != unix.EOPNOTSUPP {
		return &os.PathError{Op: "BLKDISCARD", Path: f.Name(), Err: errno}
	}
	chunk := make([]byte, zeroChunk)
	for end := offset + size; offset < end; offset += int64(len(chunk)) {
		if err := ctx.Err(); err != nil {
			return err
		}
		chunk = chunk[:min(zeroChunk, end-offset)]
		if _, err := f.ReadAt(chunk, offset); err != nil {
			return err
		}
		if len(bytes.TrimLeft(chunk, "\x00")) > 0 {
			clear(chunk)
			if _, err := f.WriteAt(chunk, offset); err != nil {
				return err
			}
		}
		// What was read is not kept: it would be all of a large volume.
		if err := unix.Fadvise(int(f.Fd()), offset, int64(len(chunk)), unix.FADV_DONTNEED); err != nil {
			return &os.PathError{Op: "fadvise", Path: f.Name(), Err: err}
		}
	}
	return nil
}

// Erase makes every byte of an attached volume zero, durably.
func (b *Backend) Erase(ctx context.Context, v devices.Volume) (err error) {
	defer state.Wrap(&err, "volume %s: erase", v.ID)
	at, done, err := b.locateAlone(ctx, v)
	if err != nil {
		return err
	}
	defer done()
	if at, err = b.lookAgain(ctx, at); err != nil {
		return err
	}
	if !at.volume.tags.formatting {
		return state.Errorf(state.FailedPrecondition, "no format was begun that was not ended, so its contents may be data")
	}
	d, err := at.device()
	if err != nil {
		return err
	}
	if d != nil {
		info, err := blockdev.InfoOf(d.Number)
		if err != nil {
			return err
		}
		if !info.ReadOnly {
			return b.zero(ctx, deviceName(at.group, at.volume.name), d, at.volume.pool != "")
		}
	}
	return state.Errorf(state.FailedPrecondition, "it is not attached for writing")
}
