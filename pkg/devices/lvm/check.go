package lvm

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Check implements devices.Checker. A node need not have all groups, but those of the
// volumes that are asked for. It blocks for as long as one of the groups does.
func (b *Backend) Check(ctx context.Context) error {
	var full error
	here := map[string]bool{}
	for _, name := range b.names {
		r, err := b.look(ctx, name, reportAge, turnLimit)
		if errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			return err
		}
		here[r.uuid] = true
		switch err := r.health(b.own); {
		case state.ClassOf(err) == state.ResourceExhausted:
			full = errors.Join(full, err)
		case err != nil:
			return err
		}
	}
	if b.wanted == nil {
		return full
	}
	for _, v := range b.wanted() {
		if id, own, err := parseID(v.ID); err == nil && own && !here[id.group] {
			return fmt.Errorf("volume %s: the volume group with the UUID %s: %w: see that its disks are attached to this node, and that --lvm-groups names it", v.ID, id.group, errGone)
		}
	}
	return full
}

// health judges a group: nil if nothing is wrong.
func (r *report) health(own func(logical) bool) error {
	if r.missing > 0 {
		return state.Errorf(state.Unavailable, "the volume group %s lacks %d of its disks: attach them; what has extents there cannot be used", r.name, r.missing)
	}
	used := map[string]bool{}
	for _, v := range r.volumes {
		used[v.pool] = used[v.pool] || own(v)
	}
	for _, name := range slices.Sorted(maps.Keys(r.pools)) {
		if !used[name] {
			continue
		}
		if err := r.full(r.pools[name]); err != nil {
			return err
		}
	}
	if r.free == 0 && len(r.pools) == 0 {
		return state.Errorf(state.ResourceExhausted, "the volume group %s has no room for new volumes or for growth: add a disk to it (vgextend), or delete volumes", r.name)
	}
	return nil
}

// Measure implements devices.Meter.
func (b *Backend) Measure(ctx context.Context) (all []devices.Measurement, err error) {
	for _, name := range b.names {
		r, err := b.look(ctx, name, reportAge, turnLimit)
		if errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, r.measure(b.own)...)
	}
	return all, nil
}

func (r *report) measure(own func(logical) bool) []devices.Measurement {
	group := map[string]string{"group": r.name}
	count := 0
	for _, v := range r.volumes {
		if own(v) {
			count++
		}
	}
	all := []devices.Measurement{
		{Name: "size_bytes", Help: "Size of the volume group.", Labels: group, Value: float64(r.extents * r.extent)},
		{Name: "free_bytes", Help: "What no logical volume has of the volume group.", Labels: group, Value: float64(r.free * r.extent)},
		{Name: "missing_disks", Help: "Disks of the volume group that are not there.", Labels: group, Value: float64(r.missing)},
		{Name: "volumes", Help: "Volumes of this driver in the volume group.", Labels: group, Value: float64(count)},
	}
	for _, name := range slices.Sorted(maps.Keys(r.pools)) {
		pool, labels := r.pools[name], map[string]string{"group": r.name, "thin_pool": name}
		all = append(all,
			devices.Measurement{Name: "thin_pool_size_bytes", Help: "Size of the thin pool.", Labels: labels, Value: float64(pool.bytes)},
			devices.Measurement{Name: "thin_pool_available_bytes", Help: "What new volumes and growth can be promised of the thin pool, without overcommit.", Labels: labels, Value: float64(r.spare(pool))},
			devices.Measurement{Name: "thin_pool_data_used_ratio", Help: "Share of the thin pool's data that is used; writes fail when it is 1.", Labels: labels, Value: pool.data / 100},
			devices.Measurement{Name: "thin_pool_metadata_used_ratio", Help: "Share of the thin pool's metadata that is used; the pool turns read-only when it is 1.", Labels: labels, Value: pool.metadata / 100},
		)
	}
	return all
}
