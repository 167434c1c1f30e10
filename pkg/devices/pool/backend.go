package pool

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/loop"
)

// Backend attaches the volumes of a pool as loop devices. It is a devices.Backend
// that needs only the id of a volume. Its methods may be called concurrently; except
// for Find, those for the same volume run one after the other.
//
// A device has the sectors that the volume's metadata names, and passes discards
// down for a thin volume only.
type Backend struct {
	Provisioner

	pool   *Pool
	loops  *loop.Devices
	unlock func() error // the pool; nil: it is not locked

	turns       keylock.Map       // by volume
	inspections hang.Calls[found] // at metadata, by volume
}

// NewBackend returns a Backend for the volumes of a pool, and finds devices over
// their data that the plugin did not attach. While the pool's disk does not answer, it is
// waited for some seconds; the devices are found when it answers.
func NewBackend(ctx context.Context, p *Pool, loops *loop.Devices) (*Backend, error) {
	b := &Backend{pool: p, loops: loops}
	b.Provisioner = Provisioner{Volumes: p, Delete: b.Delete}
	var looking hang.Calls[struct{}]
	_, err := looking.Do(ctx, p.dir, startTime, func() (struct{}, error) { return struct{}{}, b.recognize(ctx) })
	if hangs(err) {
		unknownDevices(ctx, err)
	} else if err != nil {
		return nil, err
	}
	return b, nil
}

// unknownDevices logs why only the tags of devices tell whose they are: the pool is away, or
// its disk does not answer.
func unknownDevices(ctx context.Context, err error) {
	klog.FromContext(ctx).Error(err, "Cannot read the volumes, so devices over their data that the plugin did not attach are unknown")
}

// recognize finds devices over the volumes' data that the plugin did not attach.
func (b *Backend) recognize(ctx context.Context) error {
	ids, err := b.pool.IDs(ctx)
	if err != nil {
		unknownDevices(ctx, err)
		return nil
	}
	files := map[loop.FileID]loop.Known{}
	for _, id := range ids {
		data, err := b.data(id)
		if err != nil {
			klog.FromContext(ctx).Error(err, "Skipped a volume's data, so what uses it is not known", "volume", id)
		} else if data != nil {
			files[data.ID] = loop.Known{Tag: b.tag(id), Volume: id}
		}
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := b.loops.Recognize(ctx, files); err != nil {
		return err
	}
	if !b.pool.readOnly {
		b.keepBlocks(ctx, ids)
	}
	return nil
}

// keepBlocks makes the devices of thick volumes refuse discards, for those that a
// crash left without that setting.
func (b *Backend) keepBlocks(ctx context.Context, ids []string) {
	for _, id := range ids {
		if b.loops.Seen(b.tag(id)) == "" {
			continue
		}
		if v, err := b.pool.Get(ctx, id); err != nil || v.Provisioning != Thick || ctx.Err() != nil {
			continue
		}
		if err := b.loops.KeepSolid(ctx, b.target(id, nil)); err != nil {
			klog.FromContext(ctx).Error(err, "Whether the device of a thick volume refuses discards is not known", "volume", id)
		}
	}
}

// Close leaves the pool to others. Devices stay as they are.
func (b *Backend) Close() error {
	if b.unlock == nil {
		return nil
	}
	return b.unlock()
}

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

// Grow makes the volume, its device and the device's view at least that many bytes
// large. A device may be grown while it is mounted.
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

// target returns the data that the volume's device is to show; nil when there is none
// or it is not known. Any other device over that data is a conflict.
func (b *Backend) target(id string, data *loop.File) loop.Target {
	path := b.pool.path(volumesDir, id, dataFile)
	return loop.Target{Tag: b.tag(id), File: data, Path: path, Place: "/" + volumesDir + "/" + id + "/"}
}

// tag is the lo_file_name of the volume's device, which also identifies the pool.
func (b *Backend) tag(id string) string { return loop.Tag(b.pool.uuid[:8], id) }

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
