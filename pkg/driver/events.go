package driver

import (
	"context"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/uevents"
)

// deviceEvents reports what happens to devices, and calls all when events were
// lost; *uevents.Listener is one.
type deviceEvents interface {
	Run(ctx context.Context, changed func(uevents.Event), all func()) error
}

// watchDevices passes events of devices to the reconciler, until ctx ends. Without
// them a change is noticed when the volume is next looked at.
func (p *plugin) watchDevices(ctx context.Context, events deviceEvents) {
	err := events.Run(ctx, func(e uevents.Event) {
		if e.Appeared {
			p.reconciler.DeviceAppeared()
		}
		if e.Gone || e.Resized {
			p.reconciler.DeviceChanged(e.Number)
		}
	}, p.reconciler.AllChanged)
	if err != nil {
		p.reconciler.DeviceEventsEnded()
		klog.FromContext(ctx).Error(err, "A device that is lost is noticed late from now on", "after", resync)
	}
}

// watchBackend passes to the reconciler what a backend notices by itself.
func (p *plugin) watchBackend(ctx context.Context, name string, w devices.Watcher) {
	err := w.Watch(ctx, func(id string) {
		if id == "" {
			p.reconciler.AllChanged()
			return
		}
		p.reconciler.VolumeChanged(id)
	})
	if err != nil && ctx.Err() == nil {
		klog.FromContext(ctx).Error(err, "What becomes of the backend's volumes is noticed late from now on", "backend", name, "after", resync)
	}
}
