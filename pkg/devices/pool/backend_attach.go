package pool

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// Attach attaches the volume, read-only or not, with the sectors that its
// metadata names. A device that is going away is reclaimed; one of another mode
// or sector size that nobody uses is attached anew. A thick volume gets back
// the blocks that it lacks before it is attached for writing, if there is room.
//
// NotFound: no such volume. FailedPrecondition: something else shows the data,
// the device is held in the other mode, or the data was truncated or replaced.
// Unavailable: somebody has the file open, perhaps a loop device that does not answer.
func (b *Backend) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	k, err := b.inspect(ctx, v.ID)
	switch {
	case err != nil:
		return err
	case k.data == nil:
		return state.Errorf(state.NotFound, "volume %s: attach: there is no such volume, or its data is gone", v.ID)
	}
	target, as := b.target(v.ID, k.data), k.shape(readOnly)
	err = b.loops.Attach(ctx, loop.Request{Target: target, Shape: as, Volume: v.ID, Open: func() (*os.File, error) { return k.open(ctx, v.ID, target, as) }})
	return wrap(err, "volume %s: attach", v.ID)
}

// open opens the data that was looked at, to be attached.
func (k found) open(ctx context.Context, id string, target loop.Target, as loop.Shape) (*os.File, error) {
	if k.facts.Size < k.facts.Capacity {
		return nil, state.Errorf(state.FailedPrecondition, "%s has %d bytes, %d fewer than the volume: it was truncated; restore it from a backup", k.facts.Backing, k.facts.Size, k.facts.Capacity-k.facts.Size)
	}
	mode := os.O_RDWR
	if as.ReadOnly {
		mode = os.O_RDONLY
	}
	f, err := loop.OpenFile(target.Path, target.File.ID, mode)
	if err != nil {
		return nil, err
	}
	if as.Solid {
		if err := refill(ctx, f); err != nil {
			klog.FromContext(ctx).Error(err, "A thick volume lacks blocks; what is written there may find no room", "volume", id)
		}
	}
	return f, nil
}

// refill allocates the holes in a thick volume's file, which come from discards that
// could not be refused. It does nothing if there is not room for all of them.
func refill(ctx context.Context, f *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("fstat %s: %w", f.Name(), err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return fmt.Errorf("fstatfs %s: %w", f.Name(), err)
	}
	lack, room := st.Size-st.Blocks*512, free(fs) // st_blocks counts 512 bytes each, see stat(2)
	if lack > room {
		return fmt.Errorf("%s lacks %d bytes, and its file system has room for %d", f.Name(), lack, room)
	}
	return fallocate(ctx, f, unix.FALLOC_FL_KEEP_SIZE, st.Size) // all of it, as st_blocks counts metadata too
}

// Detach detaches the volume's device and returns nil when it is seen to be
// gone. It leaves a device alone that is mounted or claimed, or that another
// device is stacked on. A device that is merely open goes when the last one
// closes it; the error names who has it open until then. Foreign devices are
// left alone. The pool may be away: it is asked, for as long as a look may take,
// only to prove that nothing shows the data any more.
func (b *Backend) Detach(ctx context.Context, v devices.Volume) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	k, err := b.inspectWithin(ctx, v.ID)
	if err != nil {
		k.data = nil
	}
	return wrap(b.loops.Detach(ctx, b.target(v.ID, k.data)), "volume %s: detach", v.ID)
}
