package reconciler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// fakeLayer is the device of a volume's layer.
type fakeLayer struct {
	device *fakeDevice // nil: it is closed
	over   *fakeDevice // on which it was opened, be that the volume's still or not
}

// The headers of a layer, and how much of its device they take.
const (
	stampedNew  = "new"
	used        = "used"
	headerBytes = 1 << 20
)

// layerKey is in the secrets of a volume with a layer, and rightKey opens it.
const (
	layerKey = "key"
	rightKey = "secret"
)

// layerContext is the context of a volume that wants a layer.
func layerContext() map[string]string { return map[string]string{"layer": "true"} }

// open reports whether the device of a layer stands, be it on another device.
func (v *fakeVolume) open() bool { return v.layer != nil && v.layer.device != nil }

// highest returns the highest device that stands; nil: none does.
func (v *fakeVolume) highest() *fakeDevice {
	if v.open() {
		return v.layer.device
	}
	return v.device
}

// top returns the device that is formatted, mounted and shown; nil: it does not stand.
func (v *fakeVolume) top() *fakeDevice {
	if v.layer != nil {
		return v.layer.device
	}
	return v.device
}

// has reports whether a device is one of the volume's.
func (v *fakeVolume) has(number state.DeviceNumber) bool {
	return v.device != nil && v.device.number == number || v.shows(number)
}

// shows reports whether a number is that with which a volume is or was published.
func (v *fakeVolume) shows(number state.DeviceNumber) bool {
	return slices.ContainsFunc([]*fakeDevice{v.top(), v.view}, func(d *fakeDevice) bool { return d != nil && d.number == number })
}

// lowest returns what is on the device of the backend, but for the layer.
func (v *fakeVolume) lowest() *state.Contents {
	if v.layer != nil {
		return &v.beneath
	}
	return &v.contents
}

// marked reports whether a format of the top was begun and has not ended.
func (v *fakeVolume) marked() bool { return v.formatting || v.header == stampedNew }

// unready says why the devices of a staged volume are not as they should be.
func (v *fakeVolume) unready() string {
	switch {
	case v.source:
		return ""
	case v.device == nil || v.device.detaching:
		return "the device is not attached"
	case v.layer != nil && (!v.open() || v.layer.device.detaching || v.layer.over != v.device):
		return "the layer is not open"
	}
	return ""
}

// swap puts another device in the place of the volume's, or that one back.
func (v *fakeVolume) swap() { v.fakeData, v.spare = v.spare, v.fakeData }

// unplug takes the device away from under the layer, which stands on it still.
func (v *fakeVolume) unplug() {
	if v.open() {
		v.device = nil
	}
}

// plug puts it back.
func (v *fakeVolume) plug() {
	if v.open() {
		v.device = v.layer.over
	}
}

// fakeLayers is the layer of the volumes that want one.
type fakeLayers struct{ *process }

func (fakeLayers) Name() string { return "layer" }

func (fakeLayers) Wanted(v devices.Volume) bool { return v.Context["layer"] == "true" }

func (l fakeLayers) Find(ctx context.Context, lower state.Device, volume devices.Volume) (have state.Device, err error) {
	id := volume.ID
	err = l.call(ctx, opFindLayer, id, id, func(bool) error {
		have = state.Device{State: state.DeviceAbsent, NeedsSecret: volume.Secrets.Get(layerKey) == "", Backing: "/pool/" + id}
		v := l.k.volumes[id]
		if v == nil {
			return nil
		}
		if lower.Attached() {
			have.Unmade, have.Fresh, have.Capacity = v.header == "" || v.zeros, v.header == stampedNew && !v.zeros, lower.Size-headerBytes
		}
		if !v.open() {
			return nil
		}
		d := v.layer.device
		have.State = state.DeviceAttached
		if d.detaching {
			have.State = state.DeviceDetaching
		}
		have.Number, have.Path, have.Size, have.ReadOnly = d.number, fmt.Sprintf("/dev/loop%d", d.number.Minor), d.size, d.readOnly
		if !lower.Present() || v.layer.over.number != lower.Number {
			have.State, have.Stray, have.Unmade, have.Holder = state.DeviceForeign, true, false, have.Path
		}
		return nil
	})
	return have, err
}

// change is a call that changes the layer on a device that is the volume's.
func (l fakeLayers) change(ctx context.Context, o op, lower state.Device, id string, act func(v *fakeVolume, half bool) error) error {
	return l.call(ctx, o, id, id, func(half bool) error {
		v := l.k.volumes[id]
		if v.device == nil || v.device.number != lower.Number {
			return l.k.refuse(id, "%s on a device that is not the volume's", o)
		}
		return act(v, half)
	})
}

func (l fakeLayers) Create(ctx context.Context, lower state.Device, volume devices.Volume) error {
	return l.change(ctx, opCreateLayer, lower, volume.ID, func(v *fakeVolume, half bool) error {
		switch {
		case v.zeros:
			return errors.New("cryptsetup reported success, and there is no header")
		case v.header == stampedNew:
			return nil
		case half:
			v.beneath = state.Contents{Kind: state.ContentsOther, Found: "half a layer"}
			return nil
		}
		v.header, v.beneath = stampedNew, state.Contents{Kind: state.ContentsOther, Found: "a layer"}
		v.contents = state.Contents{Kind: state.ContentsOther, Found: "noise"}
		return nil
	})
}

func (l fakeLayers) Open(ctx context.Context, lower state.Device, volume devices.Volume, readOnly bool) error {
	return l.change(ctx, opOpenLayer, lower, volume.ID, func(v *fakeVolume, _ bool) error {
		switch key := volume.Secrets.Get(layerKey); {
		case key == "":
			return l.k.refuse(volume.ID, "open-layer without a secret")
		case key != rightKey:
			return state.Errorf(state.Unauthenticated, "the key does not fit")
		case !v.open() && v.held:
			return fmt.Errorf("the device is held by pid 7 (holder)")
		case !v.open():
			v.layer.device = &fakeDevice{number: l.k.number(), size: v.device.size - headerBytes, readOnly: readOnly}
			v.layer.over = v.device
		case v.layer.device.readOnly != readOnly && !v.layer.device.detaching:
			return l.k.refuse(volume.ID, "open-layer of one that is open with another access")
		}
		v.layer.device.detaching = false
		l.k.regain()
		return nil
	})
}

func (l fakeLayers) Close(ctx context.Context, _ state.Device, volume devices.Volume) error {
	id := volume.ID
	return l.call(ctx, opCloseLayer, id, id, func(bool) error {
		v := l.k.volumes[id]
		if !v.open() {
			return nil
		}
		if l.k.claimed(v) {
			return fmt.Errorf("the layer of %s is held by pid 7 (holder)", id)
		}
		v.layer.device = nil
		l.k.autoclear(v)
		l.k.orphan()
		return nil
	})
}

func (l fakeLayers) Grow(ctx context.Context, lower state.Device, volume devices.Volume) error {
	return l.change(ctx, opGrowLayer, lower, volume.ID, func(v *fakeVolume, half bool) error {
		if !half {
			v.layer.device.size = v.device.size - headerBytes
		}
		return nil
	})
}

func (l fakeLayers) Erase(ctx context.Context, lower state.Device, volume devices.Volume) error {
	return l.change(ctx, opEraseLayer, lower, volume.ID, func(v *fakeVolume, half bool) error {
		if err := l.k.exclusive(volume.ID, "erase-layer"); err != nil {
			return err
		}
		if !half {
			v.contents = state.Contents{Kind: state.ContentsBlank}
		}
		return nil
	})
}

func (l fakeLayers) Used(ctx context.Context, lower state.Device, volume devices.Volume) error {
	return l.change(ctx, opUseLayer, lower, volume.ID, func(v *fakeVolume, half bool) error {
		if !half {
			v.header = used
		}
		return nil
	})
}

// sourceType is the file system of such a volume.
const sourceType = "nfs4"

// Source tells of the volumes that are mounted without a device.
func (d fakeDevices) Source(_ context.Context, volume devices.Volume) (source state.Source, ok bool, err error) {
	d.k.with(func() {
		if v := d.k.volumes[volume.ID]; v != nil && v.source {
			source, ok = state.Source{FSType: sourceType, Source: d.k.sourceOf(volume.ID), Deadline: 30 * time.Second}, true
		}
	})
	return source, ok, nil
}

// sourceOf returns from what a volume is mounted now.
func (k *fakeKernel) sourceOf(id string) string {
	if k.volumes[id].moved {
		return "other:/" + id
	}
	return "server:/" + id
}

// MountSource comes back at the deadline of the source, whatever the server does.
func (m fakeMounts) MountSource(ctx context.Context, source state.Source, at string, flags state.Flags) error {
	ctx, end := context.WithTimeout(ctx, source.Deadline)
	defer end()
	return m.call(ctx, opMountSource, volumeOf(at), at, func(half bool) error {
		if half {
			m.k.files[at] = &fakeFile{kind: state.Directory}
			return nil
		}
		if id := volumeOf(at); source.Source != m.k.sourceOf(id) && m.k.fresh(id) {
			return m.k.violate("volume %s: %s is mounted from %s, and is in %s", id, at, source.Source, m.k.sourceOf(id))
		}
		return m.place(at, state.Directory, fakeMount{volume: volumeOf(at), Mount: state.Mount{
			FSType: source.FSType, Source: source.Source, Root: "/", Attributes: flags.Set}})
	})
}
