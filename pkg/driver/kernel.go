package driver

import (
	"context"
	"errors"

	"github.com/csi-node/csi-node/pkg/devices"
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
	}}
}

// bound reports whether a node of the device is bound anywhere on this node.
func (p *plugin) bound(number state.DeviceNumber) (bool, error) {
	if p.watcher == nil {
		return false, errors.New("what is bound on this node is not known yet")
	}
	return p.watcher.Bound(number)
}
