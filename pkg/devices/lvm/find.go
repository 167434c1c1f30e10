package lvm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
)

// Find asks the device mapper for the device, and takes the rest from the report of the
// group, which is in memory while nothing changes. A volume that was not zeroed yet has no
// device for anybody, though it is active while it is zeroed.
func (b *Backend) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	id, own, err := parseID(v.ID)
	if err != nil {
		return state.Device{}, err
	}
	d := state.Device{State: state.DeviceAbsent}
	if !own {
		d.Missing = true
		return d, nil
	}
	if err := ctx.Err(); err != nil {
		return state.Device{}, err
	}
	active, group, err := b.active(id)
	if err != nil {
		return state.Device{}, fmt.Errorf("volume %s: find: %w", v.ID, err)
	}
	at, err := b.placeOf(ctx, v, id, findLimit)
	switch {
	case ctx.Err() != nil:
		return state.Device{}, ctx.Err()
	case errors.Is(err, errMissing):
		d.Missing = true
	case errors.Is(err, errGone) && active == nil: // Attach says so
	case err != nil: // the tags may say that what is on the device is no data, or somebody else's
		d.Err = fmt.Errorf("volume %s: find: %w", v.ID, err)
	default:
		at.tell(&d)
		if active != nil && identity(active.UUID) != d.Identity {
			active = nil // it is what another volume of that name has left
		}
	}
	if active == nil || err == nil && at.volume.tags.unzeroed {
		return d, nil
	}
	if err := tellDevice(&d, active); err != nil {
		return state.Device{}, fmt.Errorf("volume %s: find: %s: %w", v.ID, deviceName(group, id.name), err)
	}
	return d, nil
}

// identity is what a device of the device mapper says that it is.
func identity(uuid string) string { return string(blockdev.DMUUID) + ":" + uuid }

// tell adds to a device what the report has about the volume.
func (p place) tell(d *state.Device) {
	t := p.volume.tags
	d.Identity = identity(uuidPrefix + p.report.uuid + p.volume.uuid)
	d.Size, d.Capacity, d.Unit = p.volume.bytes, p.volume.bytes, p.volume.layout.unit(p.report.extent)
	d.Backing = p.path()
	d.Formatting, d.Formatted, d.Raw, d.CreatedFor = t.formatting, t.formatted, t.raw, t.fsType
	d.Fresh = t.fresh && !t.formatting && !t.raw && t.formatted == ""
}

// tellDevice adds to a device what the kernel has about an active volume.
func tellDevice(d *state.Device, active *mapper.Device) error {
	info, err := blockdev.InfoOf(active.Number)
	if err != nil {
		return err
	}
	d.State, d.Number, d.Path = state.DeviceAttached, active.Number, info.Path
	d.Size, d.ReadOnly = info.Size, info.ReadOnly
	d.Identity = identity(active.UUID)
	return nil
}

// Attached returns the volumes that are active. A group that cannot be looked at is logged
// and left out.
func (b *Backend) Attached(ctx context.Context) ([]devices.Attachment, error) {
	var all []devices.Attachment
	for _, name := range b.names {
		r, err := b.reportOf(ctx, name, reportAge, turnLimit)
		if errors.Is(err, errGone) {
			continue
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			klog.FromContext(ctx).Error(err, "Skipped a volume group, so which of its volumes are attached is not known", "group", name)
			continue
		}
		for _, lv := range slices.Sorted(maps.Keys(r.volumes)) {
			if !b.own(r.volumes[lv]) {
				continue
			}
			id := volumeID{r.uuid, lv}.String()
			d, err := b.Find(ctx, devices.Volume{ID: id})
			if err != nil {
				return nil, err
			}
			if d.Attached() {
				all = append(all, devices.Attachment{Volume: id, Device: d})
			}
		}
	}
	slices.SortFunc(all, func(a, b devices.Attachment) int { return strings.Compare(a.Volume, b.Volume) })
	return all, nil
}
