package lvm

import (
	"context"
	"errors"
	"fmt"
	"strconv"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
)

// growthPrefix begins the names of what volumes are about to grow by. No volume's name
// does: they have no capitals.
const growthPrefix = "Growth-"

// Grow makes the volume at least that many bytes large, also while it is mounted.
//
// What a thick volume grows by was somebody else's. It is first made a logical volume of
// its own, which is zeroed; then that is removed, and the volume takes just these extents.
// If it is interrupted, what was zeroed is free again (mend).
//
// ResourceExhausted: there is no room, or a thin pool could fill.
func (b *Backend) Grow(ctx context.Context, v devices.Volume, bytes int64) (err error) {
	defer state.Wrap(&err, "volume %s: grow", v.ID)
	at, done, err := b.locateAlone(ctx, v)
	if err != nil {
		return err
	}
	defer done()
	if at.volume.bytes >= bytes {
		return b.reload(ctx, at)
	}
	if bytes > devices.LargestBytes {
		return state.Errorf(state.ResourceExhausted, "no volume can have %d bytes", bytes)
	}
	if at.volume.odd != "" {
		return state.Errorf(state.FailedPrecondition, "the logical volume %s is %s, as this plugin makes none: enlarge it by hand (lvextend); what is added shows what was on the disks", at.path(), at.volume.odd)
	}
	unit := at.volume.layout.unit(at.report.extent)
	extents := ((bytes+unit-1)/unit*unit - at.volume.bytes) / at.report.extent
	if at.volume.pool != "" || at.volume.tags.unzeroed { // which is zeroed as a whole
		return b.inTurn(ctx, at.group, turnLimit, func(ctx context.Context) error { return b.extend(ctx, at, extents, nil) })
	}
	return b.growZeroed(ctx, at, extents)
}

// reload lets the device of a volume be as large as that is: an expansion was interrupted.
func (b *Backend) reload(ctx context.Context, at place) error {
	d, err := at.device()
	if err != nil || d == nil {
		return err
	}
	var told state.Device
	if err := tellDevice(&told, d); err != nil || told.Size >= at.volume.bytes {
		return err
	}
	return b.inTurn(ctx, at.group, turnLimit, func(ctx context.Context) error {
		_, err := b.command(ctx, at.group, "lvchange", "--refresh", at.path())
		return err
	})
}

// roomFor returns the disks on which a volume is to have so many extents more, none if it
// may be any. The caller has the group's turn. Unavailable: the volume has changed, and how
// much it is to grow by was reckoned from an older report.
//
// A mirror grows on the disks that it has: on others its legs could change places.
func (b *Backend) roomFor(ctx context.Context, at place, extents int64) (paths []string, err error) {
	r, err := b.refresh(ctx, at.group)
	if err != nil {
		return nil, err
	}
	if now := r.volumes[at.volume.name]; now.uuid != at.volume.uuid || now.bytes != at.volume.bytes {
		return nil, state.Errorf(state.Unavailable, "the logical volume %s has changed since it was looked at", at.path())
	}
	if at.volume.layout.raid1 {
		if paths, err = b.mirrorDisks(ctx, at); err != nil {
			return nil, err
		}
		return paths, r.takeOn(paths, extents)
	}
	return r.emptiest(at.volume.layout.legs()), r.take(r.class(at.volume), extents*r.extent)
}

// extend adds extents to a volume, those in the ranges if there are any. The layout stays.
// The caller has the group's turn.
func (b *Backend) extend(ctx context.Context, at place, extents int64, ranges []string) (err error) {
	if ranges == nil {
		if ranges, err = b.roomFor(ctx, at, extents); err != nil {
			return err
		}
	}
	defer b.renew(ctx, at.group)
	arguments := []string{"lvextend", "--yes", "--extents", "+" + strconv.FormatInt(extents, 10)}
	if at.volume.layout.raid1 {
		arguments = append(arguments, "--alloc", "cling") // each leg on its own disk
		// Else LVM would ask whether what is added is to be copied to the other disk.
		var end func() error
		if end, err = b.activeMeanwhile(ctx, at); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, end()) }()
	}
	return b.change(ctx, at.group, append(append(arguments, at.path()), ranges...)...)
}

// activeMeanwhile sees that a volume is active until end is called. The caller has the
// group's turn.
func (b *Backend) activeMeanwhile(ctx context.Context, at place) (end func() error, err error) {
	if d, err := at.device(); err != nil || d != nil {
		return func() error { return nil }, err
	}
	return b.wake(ctx, at.group, at.volume.name)
}

// wake activates a logical volume that is not active, until end is called. The caller
// has the group's turn.
func (b *Backend) wake(ctx context.Context, group, name string) (end func() error, err error) {
	change := func(to string) error {
		_, err := b.command(ctx, group, "lvchange", "--activate", to, group+"/"+name)
		return err
	}
	return func() error { return change("n") }, change("y")
}

// growZeroed adds extents to a thick volume that were zeroed before.
func (b *Backend) growZeroed(ctx context.Context, at place, extents int64) error {
	name := growthPrefix + at.volume.name
	device := deviceName(at.group, name)
	b.note(b.zeroing, device, true) // so that nobody takes it for what another process left
	defer b.note(b.zeroing, device, false)
	err := b.inTurn(ctx, at.group, turnLimit, func(ctx context.Context) error {
		if err := b.dropGrowth(ctx, at, name); err != nil {
			return err
		}
		paths, err := b.roomFor(ctx, at, extents)
		if err != nil {
			return err
		}
		// Of a mirror it is both legs, one after the other in stripes.
		l, total := at.volume.layout, extents
		if l.raid1 {
			l = layout{stripes: mirrors, stripe: min(defaultStripe, at.report.extent)}
			total *= mirrors
		}
		arguments := []string{"lvcreate", "--yes", "--activate", "y", "--wipesignatures", "n", "--zero", "n", "--setautoactivation", "n", "--name", name, "--extents", strconv.FormatInt(total, 10)}
		arguments = append(tagged(append(arguments, l.arguments()...), tags{driver: b.driver, growth: true}), at.group)
		defer b.renew(ctx, at.group)
		return b.change(ctx, at.group, append(arguments, paths...)...)
	})
	if err != nil {
		return err
	}
	d, err := mapper.Find(device)
	switch {
	case err != nil:
	case d == nil:
		err = fmt.Errorf("lvm has activated %s/%s, and there is no such device", at.group, name)
	default:
		err = b.zero(ctx, device, d, false)
	}
	zeroed := err
	return b.inTurn(context.WithoutCancel(ctx), at.group, turnLimit, func(ctx context.Context) error {
		var ranges []string
		err := zeroed
		if err == nil {
			var out []byte
			out, err = b.command(ctx, at.group, "lvs", "--segments", "--reportformat", "json", "--options", "seg_pe_ranges", at.group+"/"+name)
			if err == nil {
				ranges, err = parseRanges(out)
			}
		}
		if err := errors.Join(err, b.dropGrowth(ctx, at, name)); err != nil {
			return err
		}
		return b.extend(ctx, at, extents, ranges)
	})
}

// dropGrowth removes what a volume was to grow by, if it is there. The caller has the
// group's turn.
func (b *Backend) dropGrowth(ctx context.Context, at place, name string) error {
	r, err := b.readReport(ctx, at.group)
	if err != nil {
		return err
	}
	if lv, has := r.volumes[name]; !has || !lv.tags.growth {
		return nil
	}
	defer b.dropReport(at.group)
	return b.change(ctx, at.group, "lvremove", "--force", "--yes", at.group+"/"+name)
}
