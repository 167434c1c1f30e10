package reconciler

import (
	"context"
	"fmt"
	"path"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// fakePool is more than the fake backend has room for, in bytes.
const fakePool = 1 << 50

// fakeDevices is the backend, the formatter and the viewer of a process.
type fakeDevices struct{ *process }

// Validate takes any id.
func (d fakeDevices) Validate(devices.Volume) error { return nil }

func (d fakeDevices) Find(ctx context.Context, volume devices.Volume) (have state.Device, err error) {
	id := volume.ID
	err = d.call(ctx, opFind, id, id, func(bool) error {
		have = d.k.facts(id)
		return nil
	})
	return have, err
}

// onVolume is a call that changes a volume, which must be there.
func (d fakeDevices) onVolume(ctx context.Context, o op, id string, act func(v *fakeVolume, half bool) error) error {
	return d.call(ctx, o, id, id, func(half bool) error {
		v := d.k.volumes[id]
		if v == nil {
			return d.k.refuseAs(state.NotFound, id, "%s of a missing volume", o)
		}
		return act(v, half)
	})
}

func (d fakeDevices) Attach(ctx context.Context, volume devices.Volume, readOnly bool) error {
	id := volume.ID
	return d.onVolume(ctx, opAttach, id, func(v *fakeVolume, _ bool) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case v.foreign != "":
			return d.k.refuse(id, "attach beside %s", v.foreign)
		case v.device == nil && v.away:
			return fmt.Errorf("volume %s: attach: %w", id, devices.ErrNoDevice)
		case v.device == nil && v.size < v.capacity:
			return d.k.refuse(id, "attach of a truncated backing")
		case v.device == nil:
			v.device = &fakeDevice{number: d.k.number(), size: v.size, readOnly: readOnly}
		case v.device.readOnly != readOnly && !v.device.detaching && d.k.obeys && !d.k.claimed(v):
			v.device = &fakeDevice{number: d.k.number(), size: v.size, readOnly: readOnly}
		case v.device.readOnly != readOnly && !v.device.detaching:
			return d.k.refuseAs(state.FailedPrecondition, id, "attach of a device that stands with another access")
		}
		v.device.detaching = false
		d.k.regain()
		return nil
	})
}

func (d fakeDevices) Detach(ctx context.Context, volume devices.Volume) error {
	id := volume.ID
	return d.call(ctx, opDetach, id, id, func(bool) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		v := d.k.volumes[id]
		if v == nil || v.device == nil {
			return nil
		}
		if paths := d.k.seen(id, v.highest().number); len(paths) > 0 {
			return d.k.refuse(id, "detach while mounted at %v", paths)
		}
		if v.view != nil {
			return d.k.refuse(id, "detach beneath its view")
		}
		if d.k.claimed(v) {
			return fmt.Errorf("device of %s is held by pid 7 (holder)", id)
		}
		v.device = nil
		d.k.orphan()
		return nil
	})
}

func (d fakeDevices) Grow(ctx context.Context, volume devices.Volume, bytes int64) error {
	return d.onVolume(ctx, opGrowDevice, volume.ID, func(v *fakeVolume, half bool) error {
		if err := ctx.Err(); err != nil {
			return err
		}
		if bytes > fakePool {
			return state.Errorf(state.ResourceExhausted, "volume %s: no room for %d bytes", volume.ID, bytes)
		}
		v.capacity = max(v.capacity, bytes)
		v.size = max(v.size, v.capacity)
		if !half && v.device != nil {
			v.device.size = v.size
		}
		return nil
	})
}

// TryFormat begins the trial of a volume whose facts are notes.
func (d fakeDevices) TryFormat(ctx context.Context, volume devices.Volume) (uuid string, err error) {
	id := volume.ID
	return uuid, d.onVolume(ctx, opTryFormat, id, func(v *fakeVolume, _ bool) error {
		if !v.noted {
			return d.k.refuse(id, "trial of what nobody else can have")
		}
		d.k.formats++
		uuid = fmt.Sprintf("uuid-%d", d.k.formats)
		v.formatting, v.uuid, v.trial = false, "", uuid
		return nil
	})
}

func (d fakeDevices) BeginFormat(ctx context.Context, volume devices.Volume) error {
	id := volume.ID
	return d.onVolume(ctx, opBeginFormat, id, func(v *fakeVolume, _ bool) error {
		switch {
		case v.formatted != "":
			return d.k.refuseAs(state.FailedPrecondition, id, "formatting mark on what was formatted as %q", v.formatted)
		case v.raw:
			return d.k.refuseAs(state.FailedPrecondition, id, "formatting mark on what was published raw")
		}
		kind := v.lowest().Kind
		blank := kind == state.ContentsBlank || kind == state.ContentsUnproven
		if free := d.k.free(id); !blank || v.data || !free {
			if err := d.k.rule(id, "formatting mark on %v, data %t, free %t", kind, v.data, free); err != nil {
				return err
			}
		}
		if v.noted && v.trial == "" {
			return d.k.refuse(id, "formatting mark without a trial")
		}
		v.formatting, v.uuid, v.trial = true, v.trial, ""
		return nil
	})
}

func (d fakeDevices) Erase(ctx context.Context, volume devices.Volume) error {
	id := volume.ID
	return d.onVolume(ctx, opErase, id, func(v *fakeVolume, half bool) error {
		switch {
		case !v.formatting || v.data:
			return d.k.refuseAs(state.FailedPrecondition, id, "erased without a formatting mark or with data")
		case v.device == nil || v.device.readOnly:
			return d.k.refuseAs(state.FailedPrecondition, id, "erased and not attached for writing")
		}
		if err := d.k.exclusive(id, "erase"); err != nil {
			return err
		}
		if c := *v.lowest(); v.uuid != "" && c.Kind != state.ContentsBlank && c.Kind != state.ContentsUnproven && c.UUID != v.uuid && !strings.HasPrefix(c.Found, "half") && !v.zeros {
			return d.k.refuse(id, "erased %+v under the mark of %s", c, v.uuid)
		}
		if !half && !v.zeros {
			*v.lowest() = state.Contents{Kind: state.ContentsBlank}
			v.stamp = ""
		}
		return nil
	})
}

func (d fakeDevices) BeginRaw(ctx context.Context, volume devices.Volume) error {
	return d.onVolume(ctx, opBeginRaw, volume.ID, func(v *fakeVolume, _ bool) error {
		v.raw = true
		return nil
	})
}

// AbandonFormat clears the mark of a volume whose facts are notes.
func (d fakeDevices) AbandonFormat(ctx context.Context, volume devices.Volume) error {
	return d.onVolume(ctx, opAbandonFormat, volume.ID, func(v *fakeVolume, _ bool) error {
		if v.noted {
			v.formatting, v.uuid = false, ""
		}
		return nil
	})
}

func (d fakeDevices) EndFormat(ctx context.Context, volume devices.Volume, fsType string) error {
	id := volume.ID
	return d.onVolume(ctx, opEndFormat, id, func(v *fakeVolume, half bool) error {
		if !v.formatting && v.formatted != fsType {
			return d.k.refuseAs(state.FailedPrecondition, id, "end of a format that was not begun")
		}
		if v.layer == nil && v.contents.FSType != fsType {
			if err := d.k.rule(id, "end of a format that left %q", v.contents.FSType); err != nil {
				return err
			}
		}
		if !half {
			v.formatting, v.uuid, v.trial, v.formatted = false, "", "", fsType
		}
		return nil
	})
}

// free reports whether a device is there to be written to, and nobody has it.
func (k *fakeKernel) free(id string) bool {
	v := k.volumes[id]
	d := v.highest()
	return d != nil && !d.detaching && !d.readOnly && !v.superRO && !k.claimed(v) && v.view == nil && len(k.mounted(id, d.number, "")) == 0
}

// exclusive checks that a device may be written to: attached, writable, held
// by nobody.
func (k *fakeKernel) exclusive(id, what string) error {
	if !k.free(id) {
		return k.refuse(id, "%s on a device that is not attached for writing and free", what)
	}
	return nil
}

// Held is a part of the look that Find begins: it does not fail by itself.
func (d fakeDevices) Held(_ context.Context, device state.Device) (bool, error) {
	d.k.mu.Lock()
	defer d.k.mu.Unlock()
	id := path.Base(device.Backing)
	d.k.calls[callKey{opHeld, id}]++
	v := d.k.volumes[id]
	switch {
	case v == nil || v.highest() == nil:
		return false, nil
	case v.highest().number == device.Number:
		return d.k.claimed(v), nil
	case v.view != nil && v.view.number == device.Number:
		return v.viewHeld, nil
	}
	return v.open() && v.layer.over == v.device && v.device.number == device.Number, nil // the layer claims what it stands on
}

func (d fakeDevices) FindView(ctx context.Context, device state.Device) (view state.Device, err error) {
	id := path.Base(device.Backing)
	err = d.call(ctx, opFindView, id, id, func(bool) error {
		view = state.Device{State: state.DeviceAbsent}
		if v := d.k.volumes[id]; v != nil && v.view != nil {
			view = state.Device{State: state.DeviceAttached, Number: v.view.number, Path: fmt.Sprintf("/dev/loop%d", v.view.number.Minor), ReadOnly: true, Size: v.highest().size, Backing: device.Backing}
		}
		return nil
	})
	return view, err
}

func (d fakeDevices) AttachView(ctx context.Context, device state.Device) error {
	id := path.Base(device.Backing)
	return d.call(ctx, opAttachView, id, id, func(bool) error {
		v := d.k.volumes[id]
		if v.highest() == nil || v.highest().number != device.Number {
			return d.k.refuse(id, "view over a device that is not there")
		}
		if v.view != nil {
			return d.k.rule(id, "view over a device that has one")
		}
		v.view = &fakeDevice{number: d.k.unused(), readOnly: true} // package loop keeps the others
		return nil
	})
}

func (d fakeDevices) DetachView(ctx context.Context, device state.Device) error {
	id := path.Base(device.Backing)
	return d.call(ctx, opDetachView, id, id, func(bool) error {
		v := d.k.volumes[id]
		if v.view == nil {
			return nil
		}
		if paths := d.k.seen(id, v.view.number); len(paths) > 0 {
			return d.k.refuse(id, "view detached while shown at %v", paths)
		}
		if v.viewHeld {
			return fmt.Errorf("view of %s is held by pid 7 (holder)", id)
		}
		v.view = nil
		d.k.autoclear(v)
		d.k.orphan()
		return nil
	})
}
