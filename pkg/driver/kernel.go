package driver

import (
	"context"
	"errors"
	"slices"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// kernel is what the reconciler acts on.
func (p *plugin) kernel() reconciler.Kernel {
	k := reconciler.Kernel{
		Devices:     p.devices,
		Layers:      p.layers,
		Views:       p.views,
		Filesystems: p.filesystem,
		Mounts:      p.mounts,
		Existing:    p.mounts.Existing(),
		Directories: p.mounts,
		Inline:      p.inline,
		Holders:     mounts.Holders,
		Bound:       p.bound,
		VolumeAt:    p.volumeAt,
		ShownAt:     p.mounts.ShownAt,
		MayName:     p.mounts.Holds,
	}
	for _, b := range p.backends {
		if lister, ok := b.Backend.(devices.Lister); ok {
			k.Listers = append(k.Listers, reconciler.Lister{Backend: b.name, Lister: lister})
		}
	}
	if p.pods != nil {
		k.Pods = p.pods
	}
	return k
}

func (p *plugin) hook() func(context.Context, string, reconciler.Step, reconciler.Moment) error {
	if p.options.Hook == nil {
		return nil
	}
	return func(ctx context.Context, volume string, step reconciler.Step, moment reconciler.Moment) error {
		return p.options.Hook(ctx, volume, string(moment), string(step.Action))
	}
}

// numbers tells which numbers of loop devices are in use: those of publishes in the
// store, bound now or not, and those of nodes that are bound on this node, by whomever.
func (p *plugin) numbers() loop.Numbers {
	return loop.Numbers{Owner: p.store.VolumeOfDevice, Bound: p.bound, Published: func(volume string, view bool) []state.DeviceNumber {
		return p.store.Get(volume).PublishedAs(view)
	}, Shown: p.shown}
}

// shown reports whether a node of the device is bound where a volume is published with it.
func (p *plugin) shown(ctx context.Context, volume string, number state.DeviceNumber) bool {
	record := p.store.Get(volume)
	if record == nil {
		return false
	}
	for path, t := range record.Targets {
		if t.Device != number {
			continue
		}
		at, err := p.mounts.Look(ctx, path, hang.NoLimit)
		if err == nil && slices.ContainsFunc(at.Mounts, func(m state.Mount) bool { return m.Node && m.Is(number) }) {
			return true
		}
	}
	return false
}

// bound reports whether a node of the device is bound anywhere on this node.
func (p *plugin) bound(number state.DeviceNumber) (bool, error) {
	if p.watcher == nil {
		return false, errors.New("what is bound on this node is not known yet")
	}
	return p.watcher.Bound(number)
}
