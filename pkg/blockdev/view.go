package blockdev

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// FindView returns the plugin's read-only device over a device.
func (b *Devices) FindView(ctx context.Context, over state.Device) (state.Device, error) {
	facts := state.Device{State: state.DeviceAbsent}
	d, err := b.loops.Recall(ctx, loop.ViewOf(over.Number))
	if err != nil {
		return state.Device{}, fmt.Errorf("view of %s: find: %w", over.Path, err)
	}
	if d != nil {
		d.Facts(&facts)
	}
	return facts, nil
}

// AttachView attaches a read-only device over a device, with sectors of the same
// size, or reclaims the one that is there. One that has fewer bytes than its device
// has grows.
func (b *Devices) AttachView(ctx context.Context, over state.Device) (err error) {
	done, err := b.turns.Lock(ctx, over.Number.String())
	if err != nil {
		return err
	}
	defer done()
	defer state.Wrap(&err, "view of %s: attach", over.Path)
	target := loop.ViewOf(over.Number)
	d, err := b.loops.Current(ctx, target)
	if err != nil {
		return err
	}
	if d == nil || d.Detaching() {
		return b.newView(ctx, target, over)
	}
	if d.Bytes() < over.Size {
		return b.loops.Grow(ctx, target, over.Size)
	}
	return nil
}

func (b *Devices) newView(ctx context.Context, target loop.Target, over state.Device) (err error) {
	backing, err := OpenFound(over, os.O_RDONLY)
	if err != nil {
		return err
	}
	sector, err := unix.IoctlGetInt(int(backing.Fd()), unix.BLKSSZGET)
	if err != nil {
		return errors.Join(&os.PathError{Op: "BLKSSZGET", Path: over.Path, Err: err}, backing.Close())
	}
	opened := false
	err = b.loops.Attach(ctx, loop.Request{
		Target: target,
		Shape:  loop.Shape{ReadOnly: true, Sector: sector},
		Volume: b.volumeAt(over.Number),
		Open:   func() (*os.File, error) { opened = true; return backing, nil },
	})
	if !opened {
		err = errors.Join(err, backing.Close())
	}
	return err
}

// OpenFound opens the node at the path of a device that was found, which must still be that
// device's.
func OpenFound(d state.Device, flags int) (*os.File, error) {
	f, err := os.OpenFile(d.Path, flags|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if now, err := numberOf(f); err != nil || now != d.Number {
		return nil, errors.Join(fmt.Errorf("%s is not the device %s any more", d.Path, d.Number), err, f.Close())
	}
	info, err := InfoOf(d.Number)
	if err == nil && info.Contradicts(d.Identity) { // else it may be one that a vendor's backend has given it
		err = fmt.Errorf("%s is not the device %s any more, but %s", d.Path, d.Identity, info.Identity())
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// DetachView detaches the view of a device; nil means that it was seen to be gone.
// A view that is mounted or claimed stays.
func (b *Devices) DetachView(ctx context.Context, over state.Device) (err error) {
	done, err := b.turns.Lock(ctx, over.Number.String())
	if err != nil {
		return err
	}
	defer done()
	defer state.Wrap(&err, "view of %s: detach", over.Path)
	return b.loops.Detach(ctx, loop.ViewOf(over.Number))
}
