package pool

import (
	"context"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Attached implements devices.Lister: the devices of volumes of the pool, and of
// volumes that it does not have any more. It looks at every volume. One that cannot be
// looked at is logged and left out.
func (b *Backend) Attached(ctx context.Context) ([]devices.Attachment, error) {
	ids, err := b.pool.IDs(ctx)
	if err != nil {
		return nil, err
	}
	var all []devices.Attachment
	seen := map[string]bool{}
	for _, id := range ids {
		seen[b.tag(id)] = true
		d, err := b.Find(ctx, devices.Volume{ID: id})
		if err == nil {
			err = d.Err
		}
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			klog.FromContext(ctx).Error(err, "Skipped a volume, so whether it is attached is not known", "volume", id)
		case d.Present():
			all = append(all, devices.Attachment{Volume: id, Device: d})
		}
	}
	strays, err := b.loops.Tagged(ctx, b.tag(""), func(tag string) bool { return seen[tag] })
	if err != nil {
		return nil, err
	}
	for _, d := range strays {
		a := devices.Attachment{Device: state.Device{Missing: true, Backing: d.Backing()}}
		d.Facts(&a.Device)
		all = append(all, a)
	}
	slices.SortStableFunc(all, func(x, y devices.Attachment) int { return strings.Compare(x.Volume, y.Volume) })
	return all, nil
}
