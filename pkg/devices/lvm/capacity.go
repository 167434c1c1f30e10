package lvm

import (
	"slices"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// fullData and fullMetadata are how much of a thin pool may be used, in percent, before
	// it makes no promise any more. A pool whose data is full lets writes wait for a minute
	// and then fail; one whose metadata is full turns read-only, and needs a repair.
	fullData     = 95
	fullMetadata = 80
)

// outOfData is what LVM says of the health of a thin pool whose data is full.
const outOfData = "out_of_data"

// spare returns how many bytes of a thin pool new claims may take: what no volume claims,
// and no more than what is free. Volumes of others count in full.
func (r *report) spare(pool thinPool) int64 {
	claimed := int64(0)
	for _, v := range r.volumes {
		if v.pool != pool.name {
			continue
		}
		claimed += devices.Claim(v.bytes, v.tags.overcommitOrNone())
	}
	free := pool.bytes - int64(float64(pool.bytes)*pool.data/100)
	return max(min(pool.bytes-claimed, free), 0)
}

// room returns how many bytes volumes of a class can have together, in whole extents.
// FailedPrecondition: there can be none, such as without the thin pool.
func (r *report) room(c class) (int64, error) {
	if r.missing > 0 { // then the group is not changed
		return 0, nil
	}
	if c.pool == "" {
		return r.bytes(c.layout, r.shared(c.layout.legs())), nil
	}
	pool, has := r.pools[c.pool]
	switch {
	case !has:
		return 0, state.Errorf(state.FailedPrecondition, "there is no thin pool %s in the volume group %s", c.pool, r.name)
	case !pool.zeroes:
		return 0, unzeroedPool(r.name, pool.name)
	}
	if r.full(pool) != nil {
		return 0, nil
	}
	return devices.RoomFor(r.spare(pool), c.overcommit) / r.extent * r.extent, nil
}

// largest returns how many bytes one thick volume can have.
func (r *report) largest(l layout) int64 {
	if legs := l.legs(); legs > 1 {
		return r.bytes(l, r.whole(legs))
	}
	return r.bytes(l, r.shared(1))
}

// bytes is the size of a new volume that has so many extents of each of its disks.
func (r *report) bytes(l layout, each int64) int64 {
	return max(each-l.metadata(r.extent), 0) * l.unit(r.extent)
}

// take returns ResourceExhausted unless there is room for so many bytes more.
func (r *report) take(c class, bytes int64) error {
	if r.missing > 0 {
		return r.incomplete()
	}
	if pool, has := r.pools[c.pool]; has {
		if err := r.full(pool); err != nil {
			return err
		}
	}
	room, err := r.room(c)
	if c.pool == "" {
		room = r.largest(c.layout)
	}
	if err != nil || bytes <= room {
		return err
	}
	pool, asked := r.pools[c.pool], state.FormatSize(bytes)
	klog.Background().Info("The volume group has no room", "group", r.name, "pool", c.pool, "asked", bytes, "available", room, "free", r.free*r.extent)
	switch {
	case c.layout.legs() > 1:
		return state.Errorf(state.ResourceExhausted, "the volume group %s has no room for %s on %d disks, each of which has the same part of it: add disks to it (vgextend), or delete volumes", r.name, asked, c.layout.legs())
	case c.pool == "":
		return state.Errorf(state.ResourceExhausted, "the volume group %s has no room for %s: add a disk to it (vgextend), or delete volumes", r.name, asked)
	}
	return state.Errorf(state.ResourceExhausted, "the thin pool %s/%s (%s) has no room for %s: the sizes of its volumes, each divided by its overcommit, count; enlarge it (lvextend), or delete volumes", r.name, pool.name, state.FormatSize(pool.bytes), asked)
}

// takeOn returns ResourceExhausted unless each of some disks has room for so many extents
// more.
func (r *report) takeOn(paths []string, extents int64) error {
	if r.missing > 0 {
		return r.incomplete()
	}
	for _, path := range paths {
		free := int64(0)
		if i := slices.IndexFunc(r.disks, func(d physical) bool { return d.path == path }); i >= 0 {
			free = r.disks[i].free
		}
		if free < extents {
			return state.Errorf(state.ResourceExhausted, "the disk %s of the volume group %s has no room for %s more: a mirror grows on the disks that it has; delete volumes, or move others away (pvmove)", path, r.name, state.FormatSize(extents*r.extent))
		}
	}
	return nil
}

// attachThem says what to do about the missing disks of a group.
const attachThem = "attach them; if they are, LVM has noted them as lost, and vgextend --restoremissing ends that"

// incomplete is the refusal of a change to a group that lacks disks.
func (r *report) incomplete() error {
	return state.Errorf(state.ResourceExhausted, "the volume group %s lacks %d of its disks, and LVM makes and enlarges nothing there until they are back: %s", r.name, r.missing, attachThem)
}

// full returns ResourceExhausted for a thin pool that is nearly full, or broken.
func (r *report) full(p thinPool) error {
	name := r.name + "/" + p.name
	switch {
	case p.broken != "" && p.broken != outOfData:
		return state.Errorf(state.ResourceExhausted, "the thin pool %s is not well: LVM says %s; see lvmthin(7)", name, p.broken)
	case p.metadata >= fullMetadata:
		return state.Errorf(state.ResourceExhausted, "the metadata of the thin pool %s is %.0f%% full: when it is full the pool turns read-only; enlarge it (lvextend --poolmetadatasize)", name, p.metadata)
	case p.data >= fullData || p.broken == outOfData:
		return state.Errorf(state.ResourceExhausted, "the thin pool %s is %.0f%% full: when it is full, writes to its volumes fail; enlarge it (lvextend), or delete data or volumes", name, p.data)
	}
	return nil
}
