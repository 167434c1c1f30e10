package disk

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Unused returns FailedPrecondition, naming who uses it, unless the volume is
// detached and nobody has its disk claimed. NotFound: nothing tells which disk it is.
func (b *Backend) Unused(ctx context.Context, v devices.Volume) error {
	return b.alone(ctx, v, os.O_RDONLY, func(*os.File, blockdev.Info) error { return nil })
}

// Clear makes every byte of the disk zero, a partition table included, and tells
// ctx how far it is. Nobody else can claim the disk meanwhile.
//
// FailedPrecondition, and state.Unwritten: somebody uses the disk, or it takes no writes.
func (b *Backend) Clear(ctx context.Context, v devices.Volume) error {
	begun := false
	err := b.alone(ctx, v, os.O_RDWR, func(f *os.File, info blockdev.Info) error {
		if info.ReadOnly {
			return state.Errorf(state.FailedPrecondition, "%s takes no writes: see to its write protection", info.Path)
		}
		var err error
		if len(info.Partitions) > 0 { // else the kernel would make those that only pods know, and udev look at them
			err = rereadPartitions(ctx, f, info)
		}
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, unix.EBUSY): // who has one open would write back what it has in memory
			return state.Errorf(state.FailedPrecondition, "a partition of %s is open: %s: %w", info.Path, strings.Join(info.Partitions, ", "), err)
		}
		begun = true // whatever else is wrong with the table, zeros may cure it
		if err := blockdev.Zero(ctx, f, info.Size, nil); err != nil {
			return err
		}
		return rereadPartitions(ctx, f, info) // which forgets them
	})
	if err != nil && !begun {
		return &state.Unwritten{Err: err}
	}
	return err
}

// rereadPartitions makes the kernel read the partition table of a disk again. EBUSY: a partition
// is open; programs that look at each new one are waited for.
func rereadPartitions(ctx context.Context, f *os.File, info blockdev.Info) (err error) {
	if info.Partition != 0 {
		return nil
	}
	poll.Until(ctx, claimInterval, claimTime, func() bool {
		err = unix.IoctlSetInt(int(f.Fd()), unix.BLKRRPART, 0)
		return !errors.Is(err, unix.EBUSY)
	})
	if err == nil || errors.Is(err, unix.EINVAL) { // it can have none
		return nil
	}
	return errors.Join(ctx.Err(), &os.PathError{Op: "BLKRRPART", Path: f.Name(), Err: err})
}

// alone runs f with the disk of a volume that is not attached.
func (b *Backend) alone(ctx context.Context, v devices.Volume, mode int, f func(*os.File, blockdev.Info) error) (err error) {
	defer state.Wrap(&err, "volume %s: clear", v.ID)
	done, err := b.volumes.Lock(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	c, s, info, err := b.look(v)
	if err == nil {
		err = same(c, s, info)
	}
	if err != nil {
		return err
	}
	end, err := b.turn(ctx, info)
	if err != nil {
		return err
	}
	defer end()
	if c.is(info) {
		return state.Errorf(state.FailedPrecondition, "it is attached as %s: unstage it first", info.Path)
	}
	if err := cmp.Or(b.free(v, c, info), unbound(info)); err != nil {
		return err
	}
	file, now, err := open(ctx, info, s, mode)
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(file, &err)
	loops, ofParts, err := now.LoopsOnDisk()
	if err != nil {
		return err
	}
	if over := slices.Concat(now.Holders, loops, ofParts); len(over) > 0 {
		return shownBy(now, over)
	}
	return f(file, now)
}
