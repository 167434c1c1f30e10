package driver

import (
	"cmp"
	"context"
	"fmt"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/note"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// backend is a backend that is open, and its name.
type backend struct {
	name string
	devices.Backend
}

// openBackends opens all kinds, the default one first.
func (p *plugin) openBackends(ctx context.Context, observeOnly bool) error {
	if err := setFlags(p.options.Backends, p.BackendFlags, observeOnly); err != nil {
		return err
	}
	var err error
	if p.loops, err = loop.New(ctx); err != nil {
		return err
	}
	if !observeOnly {
		p.loops.Reserve(p.numbers())
	}
	facts, err := note.Open(p.LibDir)
	if err != nil {
		return fmt.Errorf("--lib-dir %s: %w", p.LibDir, err)
	}
	raw := func(number state.DeviceNumber) error {
		if id := p.store.VolumeOfDevice(number); id != "" {
			return fmt.Errorf("it is the volume %s", id)
		}
		return facts.Raw(number)
	}
	byName := map[string]devices.Backend{}
	for _, kind := range p.options.Backends {
		opened, err := kind.Open(ctx, devices.Environment{
			DriverName: p.DriverName, StateDir: p.StateDir, LibDir: p.LibDir, ObserveOnly: observeOnly,
			Wanted: func() []devices.Volume { return p.wanted(kind.Name) }, Raw: raw, VolumeAt: p.store.VolumeOfDevice, Loops: p.loops,
		})
		switch {
		case state.ClassOf(err) == state.InvalidArgument && !observeOnly: // else the flags are those of the last plugin
			return command.WrongUse("%w", err)
		case err != nil:
			return err
		}
		p.backends = append(p.backends, backend{kind.Name, opened})
		if err := whole(kind, opened, len(p.backends) == 1); err != nil {
			return err
		}
		byName[kind.Name] = opened
	}
	p.devices = devices.NewSet(p.options.Backends[0].Name, byName)
	p.devices.KeepFacts(facts)
	p.layers = devices.PlaceLayers(p.options.Layers, devices.Environment{DriverName: p.DriverName, StateDir: p.StateDir, LibDir: p.LibDir, ObserveOnly: observeOnly})
	p.devices.KeepLayers(p.layers)
	p.views = blockdev.New(p.loops, p.viewedVolume)
	return nil
}

// whole returns an error if a backend lacks what its place in the driver, or its kind, asks of it.
func whole(kind devices.Kind, b devices.Backend, first bool) error {
	_, makes := b.(devices.Provisioner)
	_, owns := b.(devices.Owner)
	_, inline := b.(devices.Inliner)
	lacks := ""
	switch {
	case b == nil:
		lacks = "opens as nothing"
	case makes && !owns && !first:
		lacks = "makes volumes, is not the first one, and is no devices.Owner: a call that deletes a volume names only its id, and would go to the first one"
	case kind.Properties.Inline && !inline:
		lacks = "says Properties.Inline, and is no devices.Inliner"
	default:
		return nil
	}
	return fmt.Errorf("this driver was built with a backend %s that %s", kind.Name, lacks)
}

// wanted returns the volumes of a backend that are asked for on this node.
func (p *plugin) wanted(name string) []devices.Volume {
	var all []devices.Volume
	for _, record := range p.store.List() {
		if v := devices.Recorded(record); cmp.Or(v.Backend, v.Context[devices.BackendKey], p.options.Backends[0].Name) == name {
			all = append(all, v)
		}
	}
	return all
}

// abilities returns the backends that have an optional interface, the default one
// first.
func abilities[T any](p *plugin) []T {
	var all []T
	for _, b := range p.backends {
		if can, ok := b.Backend.(T); ok {
			all = append(all, can)
		}
	}
	return all
}

// ability returns the first backend that has an optional interface.
func ability[T any](p *plugin) (can T, ok bool) {
	for _, can := range abilities[T](p) {
		return can, true
	}
	return can, false
}

// volumeAt returns the volume that a device stands for; empty: none.
func (p *plugin) volumeAt(number state.DeviceNumber) string {
	return cmp.Or(p.located(number), p.store.VolumeOfDevice(number))
}

// viewedVolume returns the volume of a device that is to get a view, which the reconciler has
// just observed: a disk, and the device of a layer, are nowhere else told to be a volume's.
func (p *plugin) viewedVolume(number state.DeviceNumber) string {
	return cmp.Or(p.located(number), p.reconciler.VolumeOf(number))
}

// located returns the volume that a backend knows a device for; empty: none does.
func (p *plugin) located(number state.DeviceNumber) string {
	for _, b := range abilities[devices.Locator](p) {
		if id := b.VolumeAt(number); id != "" {
			return id
		}
	}
	return ""
}
