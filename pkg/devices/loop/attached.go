package loop

import (
	"context"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// Attachment is a device that the plugin attached.
type Attachment struct {
	// Volume is the id of the volume; empty when the pool has no volume for the
	// device any more.
	Volume string
	Device state.Device
	View   state.Device // over Device; its state is absent when there is none
}

// Attached returns the devices that stand for volumes of the pool, in the order
// of the volumes' ids, whoever asked for them and whenever. It looks at every
// volume, and blocks for as long as one of their devices does. A volume that
// cannot be looked at is logged and left out.
func (b *Backend) Attached(ctx context.Context) ([]Attachment, error) {
	ids, err := b.pool.IDs(ctx)
	if err != nil {
		return nil, err
	}
	var all []Attachment
	seen := map[string]bool{}
	for _, id := range ids {
		seen[b.tag(id)] = true
		a, err := b.attachment(ctx, id)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			klog.FromContext(ctx).Error(err, "Skipped a volume, so whether it is attached is not known", "volume", id)
		case a.Device.State == state.DeviceAttached || a.Device.State == state.DeviceDetaching:
			all = append(all, a)
		}
	}
	strays, _, err := b.scan(ctx)
	if err != nil {
		return nil, err
	}
	for _, d := range strays {
		if tag := d.tag(); strings.HasPrefix(tag, b.tag("")) && !seen[tag] && d.whole() {
			a := Attachment{Device: state.Device{Missing: true, Backing: backingOf(d.name)}}
			d.facts(&a.Device)
			all = append(all, a)
		}
	}
	slices.SortStableFunc(all, func(x, y Attachment) int { return strings.Compare(x.Volume, y.Volume) })
	return all, nil
}

func (b *Backend) attachment(ctx context.Context, id string) (Attachment, error) {
	a := Attachment{Volume: id}
	var err error
	if a.Device, err = b.Find(ctx, id); err == nil {
		err = a.Device.Err
	}
	if err == nil {
		a.View, err = b.FindView(ctx, a.Device)
	}
	return a, err
}
