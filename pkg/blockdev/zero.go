package blockdev

import (
	"context"
	"errors"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// zeroChunk is how many bytes are zeroed before ctx is checked again.
const zeroChunk = 1 << 30

// Zero makes the first bytes of an open device zero, durably, chunk by chunk, and leaves no
// page of the device in the page cache. The caller has claimed the device. part makes a range
// zero; nil: ZeroRange does.
func Zero(ctx context.Context, f *os.File, bytes int64, part func(offset, bytes int64) error) error {
	if part == nil {
		part = func(offset, bytes int64) error { return ZeroRange(f, offset, bytes) }
	}
	if err := f.Sync(); err != nil {
		return err
	}
	for offset := int64(0); offset < bytes; offset += zeroChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		state.Progress(ctx, "zeroed %s of %s", state.Tenths(offset, bytes), state.FormatSize(bytes))
		if err := part(offset, min(zeroChunk, bytes-offset)); err != nil {
			return err
		}
	}
	if err := f.Sync(); err != nil { // of a loop device's file as well
		return err
	}
	return rawfile.PathError("BLKFLSBUF", f, unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0))
}

// ZeroRange makes a range of a file or a device zero and keeps its blocks, if it
// can; the kernel writes zeros to a device that cannot.
func ZeroRange(f *os.File, offset, bytes int64) error {
	return rawfile.PathError("zero", f, rawfile.Fallocate(int(f.Fd()), unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes))
}

// Punch makes a range of a device zero and gives back its blocks, if it can: what
// backs a loop device gets holes.
func Punch(f *os.File, offset, bytes int64) error {
	err := rawfile.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, offset, bytes)
	if errors.Is(err, unix.EOPNOTSUPP) {
		return ZeroRange(f, offset, bytes)
	}
	return rawfile.PathError("punch", f, err)
}
