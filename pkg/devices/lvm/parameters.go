package lvm

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// The parameters of a StorageClass. groupKey is a key of the volume context, too.
const (
	groupKey        = "volumeGroup"
	poolKey         = "thinPool"
	provisioningKey = "provisioning"
	overcommitKey   = devices.OvercommitKey
	stripesKey      = "stripes"
	stripeSizeKey   = "stripeSize"
	raidKey         = "raid"
)

const (
	thick = "thick"
	thin  = "thin"
)

// class is what the parameters of a StorageClass ask for.
type class struct {
	group      string
	pool       string // of thin volumes; empty: thick
	overcommit int64  // percent: a volume counts for size × 100 / overcommit of its pool
	layout     layout // of thick volumes
}

// parse reads the parameters of a StorageClass. InvalidArgument names what is known and
// what it may be.
func (b *Backend) parse(parameters map[string]string) (class, error) {
	if len(b.names) == 0 {
		return class{}, state.Errorf(state.InvalidArgument, "parameter %s: the plugin has no volume groups: set --lvm-groups", groupKey)
	}
	values := map[string]string{
		groupKey:        "one of the groups of --lvm-groups (" + strings.Join(b.names, ", ") + "), which may be left out where there is one",
		poolKey:         "the name of a thin pool in the group, for thin volumes",
		provisioningKey: "thick (default without thinPool) or thin",
		overcommitKey:   devices.OvercommitValues,
		stripesKey:      "1 (default) to 128, the disks that a thick volume is spread over",
		stripeSizeKey:   "a power of two from 4Ki to 512Mi (default 64Ki), where stripes is more than 1",
		raidKey:         raid1 + ", two mirrors of a thick volume on two disks, or left out",
	}
	refuse := func(key string) (class, error) {
		return class{}, state.Errorf(state.InvalidArgument, "parameter %s: %.200q is not %s", key, parameters[key], values[key])
	}
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		if values[key] == "" {
			var list []string
			for _, known := range slices.Sorted(maps.Keys(values)) {
				list = append(list, known+": "+values[known])
			}
			return class{}, state.Errorf(state.InvalidArgument, "parameter %.200q is not known; there are %s", key, strings.Join(list, "; "))
		}
	}
	c := class{group: parameters[groupKey], pool: parameters[poolKey], overcommit: devices.NoOvercommit}
	if _, named := parameters[groupKey]; !named && len(b.names) == 1 {
		c.group = b.names[0]
	}
	if !slices.Contains(b.names, c.group) {
		return refuse(groupKey)
	}
	if _, named := parameters[poolKey]; named && !fitGroup.MatchString(c.pool) {
		return refuse(poolKey)
	}
	how, named := parameters[provisioningKey]
	if named && how != thick && how != thin {
		return refuse(provisioningKey)
	}
	if how == thin && c.pool == "" {
		return class{}, state.Errorf(state.InvalidArgument, "parameter %s: %s takes the parameter %s: %s", provisioningKey, thin, poolKey, values[poolKey])
	}
	if how == thick && c.pool != "" {
		return class{}, state.Errorf(state.InvalidArgument, "parameter %s: a %s volume is in no thin pool: leave it out, or add %s: %s", poolKey, thick, provisioningKey, thin)
	}
	if text, named := parameters[overcommitKey]; named {
		var ok bool
		if c.overcommit, ok = devices.ParseOvercommit(text); !ok {
			return refuse(overcommitKey)
		}
		if c.overcommit > devices.NoOvercommit && c.pool == "" {
			return class{}, state.Errorf(state.InvalidArgument, "parameter %s: only thin volumes can be overcommitted; add the parameter %s", overcommitKey, poolKey)
		}
	}
	bad, err := c.layout.parse(parameters)
	switch {
	case bad != "":
		return refuse(bad)
	case err != nil:
		return class{}, err
	case c.layout != layout{} && c.pool != "":
		return class{}, state.Errorf(state.InvalidArgument, "parameters %s, %s, %s: a thin volume lies as its thin pool does: leave them out, and make the pool so (lvcreate --type thin-pool --stripes …, or lvconvert of a mirror)", stripesKey, stripeSizeKey, raidKey)
	}
	return c, nil
}

// parse reads the layout that parameters ask for. bad is the key of a value that is not
// valid; err is about values that do not fit together.
func (l *layout) parse(parameters map[string]string) (bad string, err error) {
	if text, named := parameters[stripesKey]; named {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || n < 1 || n > mostStripes || text != strconv.FormatInt(n, 10) {
			return stripesKey, nil
		}
		if n > 1 {
			*l = layout{stripes: n, stripe: defaultStripe}
		}
	}
	if text, named := parameters[stripeSizeKey]; named {
		if l.stripe = parseStripe(text); l.stripe == 0 {
			return stripeSizeKey, nil
		}
		if l.stripes <= 1 {
			return "", state.Errorf(state.InvalidArgument, "parameter %s: only a volume with more than one stripe has it; add the parameter %s", stripeSizeKey, stripesKey)
		}
	}
	if kind, named := parameters[raidKey]; named {
		if kind != raid1 {
			return raidKey, nil
		}
		if l.raid1 = true; l.stripes > 1 {
			return "", state.Errorf(state.InvalidArgument, "parameters %s, %s: mirrors are not striped: leave out one of them", raidKey, stripesKey)
		}
	}
	return "", nil
}

// parameters is the inverse of parse, each in one spelling.
func (c class) parameters() map[string]string {
	p := map[string]string{groupKey: c.group, provisioningKey: thick, overcommitKey: devices.FormatOvercommit(c.overcommit)}
	if c.pool != "" {
		p[poolKey], p[provisioningKey] = c.pool, thin
	}
	if c.layout.stripes > 1 {
		p[stripesKey], p[stripeSizeKey] = strconv.FormatInt(c.layout.stripes, 10), stripeText(c.layout.stripe)
	}
	if c.layout.raid1 {
		p[raidKey] = raid1
	}
	return p
}
