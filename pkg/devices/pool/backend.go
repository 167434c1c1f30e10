package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// Backend attaches the volumes of a pool as loop devices. It is a devices.Backend:
// all that it needs to know of a volume is its id. Its methods may be called
// concurrently; those for one volume take turns, but for Find.
//
// A device has the sectors that the volume's metadata names, and passes discards
// down for a thin volume only.
type Backend struct {
	pool   *Pool
	loops  *loop.Devices
	unlock func() error // the pool; nil: it is not locked

	turns keylock.Map // by volume

	mu    sync.Mutex
	asked map[string]*asking // by volume
}

// NewBackend returns a Backend for the volumes of a pool, and finds devices over
// their data that the plugin did not attach.
func NewBackend(ctx context.Context, p *Pool, loops *loop.Devices) (*Backend, error) {
	b := &Backend{pool: p, loops: loops, asked: map[string]*asking{}}
	ids, err := p.IDs(ctx)
	if err != nil { // of a pool that is away, or whose disk does not answer, the tags tell
		klog.FromContext(ctx).Error(err, "The volumes are not known, so devices over their data that the plugin did not attach are not either")
		return b, nil
	}
	tags := map[loop.FileID]string{}
	for _, id := range ids {
		data, err := b.data(id)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Skipped a volume's data, so what uses it is not known", "volume", id)
		} else if data != nil {
			tags[data.ID] = b.tag(id)
		}
	}
	if err := loops.Recognize(ctx, tags); err != nil {
		return nil, err
	}
	if !p.ReadOnly() {
		b.keepBlocks(ctx, ids)
	}
	return b, nil
}

// keepBlocks sees that the devices of thick volumes refuse discards: a crash may
// have come before they did.
func (b *Backend) keepBlocks(ctx context.Context, ids []string) {
	for _, id := range ids {
		if b.loops.Seen(b.tag(id)) == "" {
			continue
		}
		if v, err := b.pool.Get(ctx, id); err != nil || v.Provisioning != Thick {
			continue
		}
		if err := b.loops.KeepSolid(ctx, b.target(id, nil)); err != nil {
			klog.FromContext(ctx).Error(err, "Whether the device of a thick volume refuses discards is not known", "volume", id)
		}
	}
}

// Pool returns the pool.
func (b *Backend) Pool() *Pool { return b.pool }

// Close leaves the pool to others. Devices stay as they are.
func (b *Backend) Close() error {
	if b.unlock == nil {
		return nil
	}
	return b.unlock()
}

// Any reports whether a device of one of the pool's volumes was seen.
func (b *Backend) Any() bool { return b.loops.AnySeen(b.tag("")) }

// Validate returns InvalidArgument for an id that no volume can have.
func (b *Backend) Validate(v devices.Volume) error { return ValidateID(v.ID) }

// Owns implements devices.Owner: a volume is the pool's if that has its directory.
// Unavailable: the pool is not there.
func (b *Backend) Owns(ctx context.Context, id string) (bool, error) {
	if ValidateID(id) != nil {
		return false, nil
	}
	switch err := unix.Access(b.pool.path(volumesDir, id), unix.F_OK); {
	case err == nil:
		return true, nil
	case !errors.Is(err, unix.ENOENT):
		return false, fmt.Errorf("volume %s: %w", id, err)
	}
	if err := b.pool.Check(ctx); err != nil { // a pool that is away looks empty
		return false, fmt.Errorf("volume %s: %w", id, err)
	}
	return false, nil
}

// Attach attaches the volume, read-only or not, with the sectors that its
// metadata names. A device that is going away is reclaimed; one of another mode
// or sector size that nobody uses is attached anew. A thick volume gets back
// the blocks that it lacks before it is attached for writing, if there is room.
//
// NotFound: no such volume. FailedPrecondition: something else shows the data,
// the device is held in the other mode, or the data was truncated or replaced.
// Unavailable: somebody has the file open, and a loop device that does not answer
// may be it.
func (b *Backend) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	k, err := b.look(ctx, v.ID)
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

// refill allocates what a thick volume's file lacks: the holes of a discard
// that could not be refused. It begins only what there is room for.
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
	for { // all of it, as st_blocks counts metadata too
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_KEEP_SIZE, 0, st.Size)
		if !errors.Is(err, unix.EINTR) || ctx.Err() != nil {
			return wrap(err, "fallocate %s", f.Name())
		}
	}
}

// Detach detaches the volume's device and returns nil when it is seen to be
// gone. It leaves a device alone that is mounted or claimed, or that another
// device is stacked on. A device that is merely open goes when the last one
// closes it; the error names who has it open until then. Foreign devices are
// left alone. The pool is not asked: it may be away.
func (b *Backend) Detach(ctx context.Context, v devices.Volume) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	return wrap(b.loops.Detach(ctx, b.target(v.ID, nil)), "volume %s: detach", v.ID)
}

// Grow makes the volume, its device and the view of that at least so many
// bytes large. A device may be grown while it is mounted.
func (b *Backend) Grow(ctx context.Context, v devices.Volume, bytes int64) error {
	done, err := b.turn(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	if err := b.pool.Grow(ctx, v.ID, bytes); err != nil {
		return err
	}
	data, err := b.data(v.ID)
	if err == nil {
		err = b.loops.Grow(ctx, b.target(v.ID, data), bytes)
	}
	return wrap(err, "volume %s: grow", v.ID)
}

// BeginFormat implements devices.Formatter: the mark is in the volume's metadata.
func (b *Backend) BeginFormat(ctx context.Context, v devices.Volume) error {
	return b.pool.BeginFormat(ctx, v.ID)
}

// EndFormat implements devices.Formatter.
func (b *Backend) EndFormat(ctx context.Context, v devices.Volume, fsType string) error {
	return b.pool.EndFormat(ctx, v.ID, fsType)
}

// BeginRaw implements devices.Formatter.
func (b *Backend) BeginRaw(ctx context.Context, v devices.Volume) error {
	return b.pool.BeginRaw(ctx, v.ID)
}

// Erase makes every byte of an attached volume zero, durably: a thick volume
// keeps its blocks, a thin one gives them back. It holds the device O_EXCL
// meanwhile, and fails when anybody else has it claimed, as a mkfs that
// outlived its caller has.
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
			return err
		}
	}
	return blockdev.Zero(ctx, f, d.Bytes(), makeZero)
}

// target returns what the volume's device is to show: its data, nil when there is
// none or it is not known. Any other device over that stands in the way.
func (b *Backend) target(id string, data *loop.File) loop.Target {
	path := b.pool.path(volumesDir, id, dataFile)
	return loop.Target{Tag: b.tag(id), File: data, Path: path, Place: "/" + volumesDir + "/" + id + "/"}
}

// tag is what the volume's device is called: it tells pools apart.
func (b *Backend) tag(id string) string { return loop.Tag(b.pool.UUID()[:8], id) }

// own returns the device of the index that the plugin attached for a volume.
func (b *Backend) own(ctx context.Context, id string) (target loop.Target, d *loop.Device, err error) {
	data, err := b.data(id)
	if err != nil {
		return target, nil, err
	}
	target = b.target(id, data)
	if d, err = b.loops.Recall(ctx, target); d != nil && !target.Owns(d) {
		d = nil
	}
	return target, d, err
}

// data looks at a volume's data; nil when there is none.
func (b *Backend) data(id string) (*loop.File, error) {
	path, err := b.pool.DataPath(id)
	if err != nil {
		return nil, err
	}
	return loop.StatFile(path)
}

// turn waits for the caller's turn to change a volume.
func (b *Backend) turn(ctx context.Context, id string) (done func(), err error) {
	if err := ValidateID(id); err != nil {
		return nil, err
	}
	return b.turns.Lock(ctx, id)
}

// VolumeAt returns the id of the volume for which the device with a number
// stands, by what sysfs names as its backing; "" when it stands for none of the
// pool. It asks neither the device nor the pool's disk.
func (b *Backend) VolumeAt(number state.DeviceNumber) string {
	sys := filepath.Join("/sys/dev/block", number.String())
	raw, err := os.ReadFile(filepath.Join(sys, "loop", "backing_file"))
	if err != nil {
		return ""
	}
	backing := strings.TrimSuffix(string(raw), "\n")
	id := filepath.Base(filepath.Dir(backing))
	path, err := b.pool.DataPath(id)
	switch {
	case err != nil:
		return ""
	case path == backing:
		return id
	}
	// An earlier container attached it, and the path is what is left of that one's.
	name, err := os.Readlink(sys)
	if err != nil || filepath.Base(backing) != dataFile || b.loops.Seen(b.tag(id)) != filepath.Base(name) {
		return ""
	}
	return id
}
