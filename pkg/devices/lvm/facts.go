package lvm

import (
	"context"
	"errors"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// BeginFormat implements devices.Formatter: the mark is a tag. A volume that was fresh, which
// spares the caller a look at its contents, must still be.
func (b *Backend) BeginFormat(ctx context.Context, v devices.Volume) error {
	return b.edit(ctx, v, "begin to format", func(was tags, t *tags) error {
		if t.formatted != "" {
			return state.Errorf(state.FailedPrecondition, "it was formatted as %s before, and is never formatted again", t.formatted)
		}
		if t.raw {
			return state.Errorf(state.FailedPrecondition, "it was published as a raw block device, and is never formatted unless it is cleared")
		}
		if was.fresh && !t.fresh {
			return state.Errorf(state.Unavailable, "it is not new any more, since it was looked at: another node may have used it")
		}
		t.formatting, t.fresh = true, false
		return nil
	})
}

// EndFormat implements devices.Formatter.
func (b *Backend) EndFormat(ctx context.Context, v devices.Volume, fsType string) error {
	return b.edit(ctx, v, "end to format", func(_ tags, t *tags) error {
		if !t.formatting && t.formatted != fsType {
			return state.Errorf(state.FailedPrecondition, "the end of a format as %s, and none was begun", fsType)
		}
		t.formatting, t.formatted = false, fsType
		return nil
	})
}

// BeginRaw implements devices.Formatter.
func (b *Backend) BeginRaw(ctx context.Context, v devices.Volume) error {
	return b.edit(ctx, v, "publish raw", func(_ tags, t *tags) error {
		t.raw, t.fresh = true, false
		return nil
	})
}

// edit changes the tags of a volume, durably, by a report of now; change gets those that were
// known before, too.
func (b *Backend) edit(ctx context.Context, v devices.Volume, step string, change func(was tags, t *tags) error) (err error) {
	defer state.Wrap(&err, "volume %s: %s", v.ID, step)
	at, err := b.locate(ctx, v)
	if err != nil {
		return err
	}
	was := at.volume.tags
	if at, err = b.lookAgain(ctx, at); err != nil {
		return err
	}
	return b.retag(ctx, at, func(t *tags) error { return change(was, t) })
}

// Unused returns FailedPrecondition while the volume is active. NotFound: no such volume.
func (b *Backend) Unused(ctx context.Context, v devices.Volume) (err error) {
	defer state.Wrap(&err, "volume %s", v.ID)
	at, err := b.locate(ctx, v)
	if err != nil {
		return err
	}
	return at.unused()
}

func (p place) unused() error {
	d, err := p.device()
	if err == nil && d != nil {
		err = state.Errorf(state.FailedPrecondition, "it is attached as the device %s: unstage it first", d.Number)
	}
	return err
}

// Clear makes every byte of an unused volume zero, and forgets what it was used for.
func (b *Backend) Clear(ctx context.Context, v devices.Volume) (err error) {
	defer state.Wrap(&err, "volume %s: clear", v.ID)
	at, done, err := b.locateAlone(ctx, v)
	if err != nil {
		return err
	}
	defer done()
	if err := at.unused(); err != nil {
		return err
	}
	b.note(b.zeroing, deviceName(at.group, at.volume.name), true)
	defer b.note(b.zeroing, deviceName(at.group, at.volume.name), false)
	d, err := b.activate(ctx, at)
	if err != nil {
		return err
	}
	err = b.zeroAfter(ctx, deviceName(at.group, at.volume.name), d, at.volume.pool != "", func() error {
		marked := at.volume.tags
		marked.formatting, marked.formatted, marked.raw, marked.fresh = true, "", false, false
		err := b.retag(ctx, at, func(t *tags) error {
			*t = marked
			return nil
		})
		if err != nil { // the mark may be there, or come yet
			err = errors.Join(err, b.takeBack(context.WithoutCancel(ctx), at, marked))
		}
		return err
	})
	if err := errors.Join(err, b.deactivate(context.WithoutCancel(ctx), at.group, at.volume.name)); err != nil {
		return err
	}
	return b.retag(ctx, at, func(t *tags) error {
		t.formatting, t.fresh, t.unzeroed = false, true, false
		return nil
	})
}
