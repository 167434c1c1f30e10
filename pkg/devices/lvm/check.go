package lvm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Check implements devices.Checker. A node need not have all groups, but those of the
// volumes that are asked for. It blocks for as long as one of the groups does.
func (b *Backend) Check(ctx context.Context) error {
	var broken, serves error // what is wrong with groups, and with those whose volumes can be used
	seen := groupsSeen{}
	for _, name := range b.names {
		r, err := b.reportOf(ctx, name, reportAge, turnLimit)
		if seen.note(r, err); errors.Is(err, errGone) {
			continue
		}
		if err == nil {
			err = r.health(b.own)
		}
		if err == nil || state.ClassOf(err) == state.ResourceExhausted || errors.As(err, new(*state.Degraded)) {
			serves = errors.Join(serves, err)
		} else {
			broken = errors.Join(broken, err)
		}
	}
	return cmp.Or(broken, b.wantedGroups(seen), serves)
}

// groupsSeen are the groups that were found, and why others may have been missed.
type groupsSeen struct {
	uuids map[string]bool
	hides error // hidden
}

func (g *groupsSeen) note(r *report, err error) {
	if err == nil {
		if g.uuids == nil {
			g.uuids = map[string]bool{}
		}
		g.uuids[r.uuid] = true
	}
	if hides := (hidden{}); errors.As(err, &hides) {
		g.hides = hides
	}
}

// wantedGroups returns an error if a volume that is asked for is of a group that was not
// found.
func (b *Backend) wantedGroups(seen groupsSeen) error {
	if b.wanted == nil {
		return nil
	}
	for _, v := range b.wanted() {
		if id, own, err := parseID(v.ID); err == nil && own && !seen.uuids[id.group] {
			gone := errGone
			if seen.hides != nil {
				gone = fmt.Errorf("%w; %w", errGone, seen.hides)
			}
			return fmt.Errorf("volume %s: the volume group with the UUID %s: %w: see that its disks are attached to this node, and that --lvm-groups names it", v.ID, id.group, gone)
		}
	}
	return nil
}

// health judges a group: nil if nothing is wrong. state.Degraded: all of the driver's
// volumes can be used, and a mirror lacks one of its disks, or is being copied to it.
func (r *report) health(own func(logical) bool) error {
	var mirrors []string
	lost := false
	for _, name := range slices.Sorted(maps.Keys(r.volumes)) {
		v := r.volumes[name]
		flaw := v.flaw()
		switch {
		case !own(v) || flaw == "":
		case v.layout.raid1:
			mirrors = append(mirrors, fmt.Sprintf("%s/%s (%s)", r.name, name, flaw))
		default:
			lost = true
		}
	}
	if r.missing > 0 && (lost || len(mirrors) == 0) {
		return state.Errorf(state.Unavailable, "the volume group %s lacks %d of its disks, and what has extents there cannot be used: %s", r.name, r.missing, attachThem)
	}
	if len(mirrors) > 0 {
		return &state.Degraded{Err: fmt.Errorf("mirrors in the volume group %s, which lacks %d of its disks, are on one disk alone or not the same on both: %s: attach the disk and run lvchange --refresh, or replace it (lvconvert --repair); see lvmraid(7)", r.name, r.missing, strings.Join(mirrors, ", "))}
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

// flaw is what is wrong with a volume; empty: nothing.
func (v logical) flaw() string {
	if v.layout.raid1 && v.broken == "" && v.synced < 100 {
		return fmt.Sprintf("%.0f%% synchronised", v.synced)
	}
	return v.broken
}

// Measure implements devices.Meter. That a group with volumes that are asked for cannot be
// found is an error, though its other groups are measured; a node need not have the rest.
func (b *Backend) Measure(ctx context.Context) (all []devices.Measurement, failed error) {
	seen := groupsSeen{}
	for _, name := range b.names {
		r, err := b.reportOf(ctx, name, reportAge, turnLimit)
		if seen.note(r, err); errors.Is(err, errGone) {
			continue
		}
		if err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		all = append(all, r.measure(b.own)...)
	}
	return all, errors.Join(failed, b.wantedGroups(seen))
}

func (r *report) measure(own func(logical) bool) []devices.Measurement {
	group := map[string]string{"group": r.name}
	count, degraded := 0, 0
	for _, v := range r.volumes {
		if own(v) {
			count++
		}
		if own(v) && v.layout.raid1 && v.flaw() != "" {
			degraded++
		}
	}
	all := []devices.Measurement{
		{Name: "size_bytes", Help: "Size of the volume group.", Labels: group, Value: float64(r.extents * r.extent)},
		{Name: "free_bytes", Help: "What no logical volume has of the volume group.", Labels: group, Value: float64(r.free * r.extent)},
		{Name: "missing_disks", Help: "Disks of the volume group that are not there.", Labels: group, Value: float64(r.missing)},
		{Name: "volumes", Help: "Volumes of this driver in the volume group.", Labels: group, Value: float64(count)},
		{Name: "degraded_volumes", Help: "Those of them that lack one of their two mirrors, or are being synchronised.", Labels: group, Value: float64(degraded)},
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
