package lvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"strconv"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// CheckParameters implements devices.Provisioner.
func (b *Backend) CheckParameters(parameters map[string]string) (map[string]string, error) {
	c, err := b.parse(parameters)
	if err != nil {
		return nil, err
	}
	return c.parameters(), nil
}

// CreateVolume makes a logical volume, with its tags in the same change of the group, and
// does not activate it.
func (b *Backend) CreateVolume(ctx context.Context, r devices.CreateRequest) (made devices.Provisioned, err error) {
	defer state.Wrap(&err, "volume %s: create", r.Name)
	c, err := b.parse(r.Parameters)
	if err = cmp.Or(ctx.Err(), err); err != nil {
		return devices.Provisioned{}, err
	}
	name := logicalName(r.Name)
	for _, group := range b.names { // of another class, perhaps
		if at := b.cachedReport(group, 0); at != nil && b.own(at.volumes[name]) && !at.volumes[name].unfinished && !b.has(b.deleting, at.volumes[name].uuid) {
			return at.provisioned(at.volumes[name]), nil
		}
	}
	err = b.inTurn(ctx, c.group, turnLimit, func(ctx context.Context) error { return b.make(ctx, c, name, r) })
	if err != nil {
		return devices.Provisioned{}, err
	}
	at, err := b.reportOf(ctx, c.group, 0, turnLimit)
	switch {
	case errors.Is(err, errGone):
		return devices.Provisioned{}, state.Errorf(state.Unavailable, "%w", err)
	case err != nil:
		return devices.Provisioned{}, err
	case !b.own(at.volumes[name]):
		return devices.Provisioned{}, state.Errorf(state.Aborted, "the logical volume %s/%s was deleted meanwhile", c.group, name)
	}
	return at.provisioned(at.volumes[name]), nil
}

// make makes a logical volume, unless it is there. The caller has the group's turn.
func (b *Backend) make(ctx context.Context, c class, name string, r devices.CreateRequest) (err error) {
	at, err := b.refresh(ctx, c.group)
	if err != nil {
		return err
	}
	lv, has := at.volumes[name]
	_, pool := at.pools[name]
	switch {
	case has && b.own(lv) && lv.unfinished: // no caller was told of it
		if err := (place{c.group, lv, at}).unused(); err != nil {
			return err
		}
		if err := b.change(ctx, c.group, "lvremove", "--yes", c.group+"/"+name); err != nil {
			return err
		}
		if at, err = b.refresh(ctx, c.group); err != nil {
			return err
		}
	case has && b.own(lv):
		return nil
	case has || pool:
		return state.Errorf(state.AlreadyExists, "the logical volume %s/%s is there, and was not made by this driver", c.group, name)
	}
	if at.pools[c.pool].asleep {
		var end func() error
		if end, err = b.wake(ctx, c.group, c.pool); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, end()) }()
		if at, err = b.refresh(ctx, c.group); err != nil {
			return err
		}
	}
	if c.layout.stripe > at.extent {
		return state.Errorf(state.InvalidArgument, "parameter %s: %s is more than an extent of the volume group %s, which has %d bytes", stripeSizeKey, stripeText(c.layout.stripe), c.group, at.extent)
	}
	bytes, err := r.Size.Choose(c.layout.unit(at.extent))
	if err == nil {
		err = at.take(c, bytes)
	}
	if err != nil {
		return err
	}
	return b.lvcreate(ctx, at, c, name, bytes, tags{driver: b.driver, name: r.Name, fsType: r.Use.FSType, layers: r.Layers, fresh: true})
}

// lvcreate makes a logical volume of the class that is not active, and that nobody
// activates but the plugin.
func (b *Backend) lvcreate(ctx context.Context, at *report, c class, name string, bytes int64, t tags) error {
	activate := "n"
	if c.layout.raid1 { // which has LVM note on the disks that they need not be copied to each other
		activate = "y"
	}
	arguments := []string{"lvcreate", "--yes", "--activate", activate, "--name", name}
	if c.pool == "" {
		t.unzeroed = true
		if !c.layout.raid1 {
			arguments = append(arguments, "--setautoactivation", "n")
		}
		arguments = append(arguments, "--wipesignatures", "n", "--zero", "n", "--extents", strconv.FormatInt(bytes/at.extent, 10))
		arguments = append(tagged(append(arguments, c.layout.arguments()...), t), c.group)
		arguments = append(arguments, at.emptiest(c.layout.legs())...)
	} else {
		t.overcommit = c.overcommit
		arguments = append(tagged(arguments, t), "--virtualsize", strconv.FormatInt(bytes, 10)+"b", "--thinpool", c.pool, c.group)
	}
	defer b.renew(ctx, c.group)
	if err := b.change(ctx, c.group, arguments...); err != nil {
		return err
	}
	if c.pool != "" || c.layout.raid1 { // of which lvcreate takes it only since 2.03.34, or not at all
		if err := b.change(ctx, c.group, "lvchange", "--setautoactivation", "n", c.group+"/"+name); err != nil {
			return err
		}
	}
	if c.layout.raid1 {
		_, err := b.command(ctx, c.group, "lvchange", "--activate", "n", c.group+"/"+name)
		return err
	}
	return nil
}

// tagged adds the arguments that set tags.
func tagged(arguments []string, t tags) []string {
	for _, tag := range t.list() {
		arguments = append(arguments, "--addtag", tag)
	}
	return arguments
}

// class returns what was asked for when a volume was made, as it is now.
func (r *report) class(v logical) class {
	return class{group: r.name, pool: v.pool, overcommit: v.tags.overcommitOrNone(), layout: v.layout}
}

// provisioned describes a volume as package devices asks for it.
func (r *report) provisioned(v logical) devices.Provisioned {
	volumeContext := map[string]string{groupKey: r.name}
	maps.Copy(volumeContext, v.tags.layers)
	return devices.Provisioned{
		ID: volumeID{r.uuid, v.name}.String(), Name: v.tags.name, Bytes: v.bytes,
		Use:        devices.Use{Block: v.tags.fsType == "", FSType: v.tags.fsType},
		Parameters: r.class(v).parameters(),
		Context:    volumeContext,
	}
}

// DeleteVolume removes the logical volume. Unavailable: its group is not on this node, so
// that its data is still on some disk. FailedPrecondition: it is attached.
func (b *Backend) DeleteVolume(ctx context.Context, v devices.Volume) (err error) {
	defer state.Wrap(&err, "volume %s: delete", v.ID)
	at, done, err := b.locateAlone(ctx, v)
	if state.ClassOf(err) == state.NotFound {
		return nil
	}
	if err != nil {
		return err
	}
	defer done()
	return b.inTurn(ctx, at.group, turnLimit, func(ctx context.Context) error {
		r, err := b.refresh(ctx, at.group) // lvremove takes what has the name by now
		if err != nil {
			return err
		}
		lv, has := r.volumes[at.volume.name]
		now := place{at.group, lv, r}
		switch {
		case r.uuid != at.report.uuid:
			return state.Errorf(state.Unavailable, "the volume group %s has become another one", at.group)
		case !has || !b.own(lv):
			return nil
		case lv.origin:
			return state.Errorf(state.FailedPrecondition, "the logical volume %s has snapshots, which would go with it: remove those first (lvremove)", now.path())
		}
		if err := now.unused(); err != nil {
			return err
		}
		b.note(b.deleting, lv.uuid, true)
		defer b.note(b.deleting, lv.uuid, false) // once the report tells that it is gone
		defer b.renew(ctx, at.group)
		if err := b.change(ctx, at.group, "lvremove", "--yes", now.path()); err != nil {
			return err
		}
		b.forgetUsed(ctx, now)
		return nil
	})
}

// GetVolume implements devices.Provisioner.
func (b *Backend) GetVolume(ctx context.Context, v devices.Volume) (devices.Provisioned, error) {
	at, err := b.locate(ctx, v)
	if err != nil {
		return devices.Provisioned{}, fmt.Errorf("volume %s: %w", v.ID, err)
	}
	return at.report.provisioned(at.volume), nil
}

// ListVolumes implements devices.Provisioner. Groups that are not on this node have none.
func (b *Backend) ListVolumes(ctx context.Context) (ids []string, err error) {
	for _, name := range b.names {
		r, err := b.reportOf(ctx, name, reportAge, turnLimit)
		if errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, v := range r.volumes {
			if b.own(v) {
				ids = append(ids, volumeID{r.uuid, v.name}.String())
			}
		}
	}
	return ids, nil
}

// GetCapacity implements devices.Provisioner: none where the group, or the thin pool, is
// not on this node.
func (b *Backend) GetCapacity(ctx context.Context, parameters map[string]string) (devices.Capacity, error) {
	c, err := b.parse(parameters)
	if err != nil {
		return devices.Capacity{}, err
	}
	r, err := b.reportOf(ctx, c.group, reportAge, turnLimit)
	if errors.Is(err, errGone) {
		return devices.Capacity{}, nil
	}
	if err != nil {
		return devices.Capacity{}, err
	}
	room, err := r.room(c)
	if err != nil {
		return devices.Capacity{}, nil
	}
	capacity := devices.Capacity{Available: room, Smallest: c.layout.unit(r.extent)}
	if c.layout.legs() > 1 {
		capacity.Largest = r.largest(c.layout)
	}
	return capacity, nil
}
