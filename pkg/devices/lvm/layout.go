package lvm

import (
	"cmp"
	"context"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// layout is how a thick volume lies on the disks of its group. Each of its legs, a stripe
// or a mirror, is whole on one disk, and no two are on the same: LVM by itself may let
// the second half of one leg follow the first half of another, and then one lost disk
// takes both mirrors.
type layout struct {
	stripes int64 // disks that its bytes are spread over; 0 and 1: they are not
	stripe  int64 // bytes on a disk before the next one follows; 0: not striped
	raid1   bool  // each of two disks has all its bytes
}

const raid1 = "raid1"

// The bounds of stripes are LVM's.
const (
	mostStripes    = 128
	leastStripe    = 4 << 10
	mostStripe     = 512 << 20
	defaultStripe  = 64 << 10
	mirrors        = 2
	imageSuffix    = "_rimage_" // of the hidden volumes that a mirror is made of
	metadataSuffix = "_rmeta_"
)

// mostRaidMetadata is what a mirror keeps of its state on each disk, at most: two headers
// and a bit for each of 2^21 regions (raid_ensure_min_region_size of lvm2).
const mostRaidMetadata = 8<<10 + 1<<21/8

var stripeSize = regexp.MustCompile(`^([1-9][0-9]{0,3})(Ki|Mi)$`)

// parseStripe reads the size of a stripe, such as 64Ki; 0: the text is not a size.
func parseStripe(text string) int64 {
	m := stripeSize.FindStringSubmatch(text)
	if m == nil {
		return 0
	}
	bytes, _ := strconv.ParseInt(m[1], 10, 64) // cannot fail: it has at most four digits
	bytes <<= map[string]int{"Ki": 10, "Mi": 20}[m[2]]
	if bytes < leastStripe || bytes > mostStripe || bytes&(bytes-1) != 0 {
		return 0
	}
	return bytes
}

func stripeText(bytes int64) string {
	if bytes%(1<<20) == 0 {
		return strconv.FormatInt(bytes>>20, 10) + "Mi"
	}
	return strconv.FormatInt(bytes>>10, 10) + "Ki"
}

// legs is the number of disks that a volume takes the same room of.
func (l layout) legs() int64 {
	if l.raid1 {
		return mirrors
	}
	return max(l.stripes, 1)
}

// unit is what sizes are multiples of.
func (l layout) unit(extent int64) int64 { return extent * max(l.stripes, 1) }

// metadata is how many extents a new volume has on each disk beside its data.
func (l layout) metadata(extent int64) int64 {
	if !l.raid1 {
		return 0
	}
	return (mostRaidMetadata + extent - 1) / extent
}

// arguments make lvcreate lay a volume so. A mirror's disks are not copied to each other
// first: all that is read of the volume was written to both, its zeroes to begin with.
func (l layout) arguments() []string {
	switch {
	case l.raid1:
		return []string{"--type", raid1, "--mirrors", strconv.Itoa(mirrors - 1), "--nosync"}
	case l.stripes > 1:
		return []string{"--type", "striped", "--stripes", strconv.FormatInt(l.stripes, 10), "--stripesize", strconv.FormatInt(l.stripe, 10) + "b"}
	}
	return nil
}

// layoutOf reads the layout of a segment; odd is not empty for one that no class has, and
// names it.
func layoutOf(kind string, areas, stripe int64) (l layout, odd string) {
	switch {
	case kind == "linear" || kind == "striped" && areas == 1:
	case kind == "striped":
		l.stripes, l.stripe = areas, stripe
	case kind == raid1 && areas == mirrors:
		l.raid1 = true
	case kind != "thin":
		odd = fmt.Sprintf("%s over %d devices", kind, areas)
	}
	return l, odd
}

// physical is a disk of a group on which there may be new extents.
type physical struct {
	path string
	free int64 // extents
}

// sortDisks puts those with the most room first.
func sortDisks(disks []physical) {
	slices.SortFunc(disks, func(a, b physical) int { return cmp.Or(cmp.Compare(b.free, a.free), cmp.Compare(a.path, b.path)) })
}

// shared returns the most extents that volumes can have on each of so many disks together,
// when each volume has disks of its own choice.
func (r *report) shared(legs int64) int64 {
	each := int64(0)
	for _, d := range r.disks {
		each += d.free
	}
	for each /= legs; each > 0; {
		sum := int64(0)
		for _, d := range r.disks {
			sum += min(d.free, each)
		}
		if sum/legs >= each {
			break
		}
		each = sum / legs
	}
	return each
}

// whole returns the most extents that one volume can have on each of so many disks.
func (r *report) whole(legs int64) int64 {
	if int64(len(r.disks)) < legs {
		return 0
	}
	return r.disks[legs-1].free
}

// emptiest returns the disks for the legs of a new volume; none for one leg, which may be
// anywhere.
func (r *report) emptiest(legs int64) (paths []string) {
	if legs == 1 {
		return nil
	}
	for _, d := range r.disks[:min(legs, int64(len(r.disks)))] {
		paths = append(paths, d.path)
	}
	return paths
}

// mirrorDisks returns the disks of a mirror. FailedPrecondition: somebody has moved a leg
// so that it is not on one disk alone. The caller has the group's turn.
func (b *Backend) mirrorDisks(ctx context.Context, at place) ([]string, error) {
	out, err := b.command(ctx, at.group, "lvs", "--all", "--segments", "--reportformat", "json", "--options", "lv_name,seg_pe_ranges", at.group)
	if err != nil {
		return nil, err
	}
	return parseMirror(out, at.volume.name)
}

func parseMirror(text []byte, name string) (paths []string, err error) {
	rows, err := parseRows(text)
	if err != nil {
		return nil, err
	}
	legs := map[string][]string{}
	for _, row := range rows {
		leg, is := strings.CutPrefix(strings.Trim(row["lv_name"], "[]"), name+imageSuffix)
		for _, extents := range strings.Fields(row["seg_pe_ranges"]) {
			if path := extents[:max(strings.LastIndexByte(extents, ':'), 0)]; is && !slices.Contains(legs[leg], path) {
				legs[leg] = append(legs[leg], path)
				paths = append(paths, path)
			}
		}
	}
	slices.Sort(paths)
	if len(legs) != mirrors || len(paths) != mirrors || paths[0] == paths[1] {
		return nil, state.Errorf(state.FailedPrecondition, "its mirrors are not on one disk each, but on %q: enlarge it by hand (lvextend), or move them (pvmove)", paths)
	}
	return paths, nil
}
