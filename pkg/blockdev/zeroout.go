package blockdev

import (
	"context"
	"errors"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// zeroOutChunk is how many bytes are zeroed between two looks at ctx.
const zeroOutChunk = 1 << 30

// ZeroOut makes every byte of a device zero, durably, and tells ctx how far it is
// (state.Progress). The device is to be open for writing, and O_EXCL: then nobody
// has it mounted. The kernel lets the device do it where it can (BLKZEROOUT), and
// else writes zeros: that takes as long as to write all of it.
func ZeroOut(ctx context.Context, f *os.File, bytes int64) error {
	for offset := int64(0); offset < bytes; offset += zeroOutChunk {
		if err := ctx.Err(); err != nil {
			return err
		}
		state.Progress(ctx, "zeroed %d of %d MiB", offset>>20, bytes>>20)
		span := [2]uint64{uint64(offset), uint64(min(zeroOutChunk, bytes-offset))}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKZEROOUT, uintptr(unsafe.Pointer(&span))); errno != 0 {
			return &os.PathError{Op: "BLKZEROOUT", Path: f.Name(), Err: errno}
		}
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.BLKFLSBUF, 0); err != nil && !errors.Is(err, unix.EACCES) {
		return &os.PathError{Op: "BLKFLSBUF", Path: f.Name(), Err: err}
	}
	return nil
}
