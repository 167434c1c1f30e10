package lvm

import (
	"math"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// fullData and fullMetadata are how much of a thin pool may be used, in percent, before
	// it makes no promise any more. A pool whose data is full lets writes wait for a minute
	// and then fail; one whose metadata is full turns read-only, and needs a repair.
	fullData     = 95
	fullMetadata = 80
)

// claim returns the bytes of its thin pool that a volume counts for: its size, or the
// share of it that its overcommit leaves.
func claim(bytes, overcommit int64) int64 {
	hundreds, rest := bytes/overcommit, bytes%overcommit
	return hundreds*100 + (rest*100+overcommit-1)/overcommit
}

// spare returns how many bytes of a thin pool new claims may take: what no volume claims,
// and no more than what is free. Volumes of others count in full.
func (r *report) spare(pool thinPool) int64 {
	claimed := int64(0)
	for _, v := range r.volumes {
		if v.pool != pool.name {
			continue
		}
		overcommit := v.tags.overcommit
		if overcommit < noOvercommit || overcommit > mostOvercommit {
			overcommit = noOvercommit
		}
		claimed += claim(v.bytes, overcommit)
	}
	free := pool.bytes - int64(float64(pool.bytes)*pool.data/100)
	return max(min(pool.bytes-claimed, free), 0)
}

// room returns how many bytes volumes of a class can have together, in whole extents.
// FailedPrecondition: there can be none, such as without the thin pool.
func (r *report) room(c class) (int64, error) {
	if c.pool == "" {
		return r.free * r.extent, nil
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
	spare := r.spare(pool)
	hundreds, rest := spare/100, spare%100
	if hundreds >= math.MaxInt64/c.overcommit {
		return math.MaxInt64 / r.extent * r.extent, nil
	}
	return (hundreds*c.overcommit + rest*c.overcommit/100) / r.extent * r.extent, nil
}

// take returns ResourceExhausted unless there is room for so many bytes more.
func (r *report) take(c class, bytes int64) error {
	if pool, has := r.pools[c.pool]; has {
		if err := r.full(pool); err != nil {
			return err
		}
	}
	room, err := r.room(c)
	switch {
	case err != nil || bytes <= room:
		return err
	case c.pool == "":
		return state.Errorf(state.ResourceExhausted, "the volume group %s has %d bytes free, and %d are asked for: add a disk to it (vgextend), or delete volumes", r.name, room, bytes)
	}
	pool := r.pools[c.pool]
	return state.Errorf(state.ResourceExhausted, "the thin pool %s/%s has room for %d bytes, and %d are asked for: it has %d bytes, of which %.0f%% are used, and the sizes of its volumes, each divided by its overcommit, count; enlarge it (lvextend), or delete volumes", r.name, pool.name, room, bytes, pool.bytes, pool.data)
}

// full returns ResourceExhausted for a thin pool that is nearly full, or broken.
func (r *report) full(p thinPool) error {
	name := r.name + "/" + p.name
	switch {
	case p.broken != "":
		return state.Errorf(state.ResourceExhausted, "the thin pool %s is not well: LVM says %s; see lvmthin(7)", name, p.broken)
	case p.metadata >= fullMetadata:
		return state.Errorf(state.ResourceExhausted, "the metadata of the thin pool %s is %.0f%% full: when it is full the pool turns read-only; enlarge it (lvextend --poolmetadatasize)", name, p.metadata)
	case p.data >= fullData:
		return state.Errorf(state.ResourceExhausted, "the thin pool %s is %.0f%% full: when it is full, writes to its volumes fail; enlarge it (lvextend), or delete data or volumes", name, p.data)
	}
	return nil
}
