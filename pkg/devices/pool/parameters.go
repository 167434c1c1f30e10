package pool

import (
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// The parameters of a StorageClass.
const (
	provisioningKey = "provisioning"
	overcommitKey   = devices.OvercommitKey
	sectorSizeKey   = "sectorSize"
)

// values tells what each parameter may be.
var values = map[string]string{
	provisioningKey: "thick (default) or thin",
	overcommitKey:   devices.OvercommitValues,
	sectorSizeKey:   "512 or 4096",
}

// parse returns a volume with the facts that the parameters ask for.
// InvalidArgument names the parameters that are known and what they may be.
func parse(parameters map[string]string) (Volume, error) {
	v := Volume{Provisioning: Thick, OvercommitPercent: devices.NoOvercommit}
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		known, good := set(&v, key, parameters[key])
		switch {
		case !known:
			return v, state.Errorf(state.InvalidArgument, "parameter %.200q is not known; there are %s", key, manual(slices.Sorted(maps.Keys(values))...))
		case !good:
			return v, state.Errorf(state.InvalidArgument, "parameter %s: %.200q is not %s", key, parameters[key], values[key])
		}
	}
	if v.OvercommitPercent > devices.NoOvercommit && v.Provisioning != Thin {
		return v, state.Errorf(state.InvalidArgument, "parameter %s: only thin volumes can be overcommitted; add the parameter %s: %s", overcommitKey, provisioningKey, Thin)
	}
	return v, nil
}

// set sets the fact that a parameter stands for.
func set(v *Volume, key, value string) (known, good bool) {
	switch key {
	case provisioningKey:
		v.Provisioning = Provisioning(value)
		return true, v.Provisioning == Thick || v.Provisioning == Thin
	case overcommitKey:
		v.OvercommitPercent, good = devices.ParseOvercommit(value)
		return true, good
	case sectorSizeKey:
		v.SectorBytes, good = map[string]int64{"512": 0, "4096": 4096}[value] // 0 is the default
		return true, good
	}
	return false, false
}

// parametersOf is the inverse of parse: the parameters of a volume, each in one spelling,
// and those that were not given as the defaults that they have.
func parametersOf(v Volume) map[string]string {
	return map[string]string{
		provisioningKey: string(v.Provisioning),
		overcommitKey:   devices.FormatOvercommit(v.OvercommitPercent),
		sectorSizeKey:   strconv.FormatInt(v.sector(), 10),
	}
}

// manual lists parameters and what they may be.
func manual(keys ...string) string {
	var list []string
	for _, key := range keys {
		list = append(list, key+": "+values[key])
	}
	return strings.Join(list, "; ")
}
