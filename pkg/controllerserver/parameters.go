package controllerserver

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// The parameters of a StorageClass.
const (
	provisioningKey = "provisioning"
	overcommitKey   = "overcommit"
	sectorSizeKey   = "sectorSize"
	// Keys of external-provisioner, which are not for the driver to know.
	kubernetesPrefix = "csi.storage.k8s.io/"
)

// values tells what each parameter may be.
var values = map[string]string{
	provisioningKey: "thick (default) or thin",
	overcommitKey:   "1 (default) to 100 with at most two decimals, for thin volumes",
	sectorSizeKey:   "512 or 4096",
}

// parse returns a volume with the facts that the parameters ask for.
// InvalidArgument names the parameters that are known and what they may be.
func parse(parameters map[string]string) (pool.Volume, error) {
	v := pool.Volume{Provisioning: pool.Thick, OvercommitPercent: pool.NoOvercommit}
	for _, key := range slices.Sorted(maps.Keys(parameters)) {
		if strings.HasPrefix(key, kubernetesPrefix) {
			continue
		}
		known, good := set(&v, key, parameters[key])
		switch {
		case !known:
			return v, state.Errorf(state.InvalidArgument, "parameter %.200q is not known; there are %s", key, manual(keys()...))
		case !good:
			return v, state.Errorf(state.InvalidArgument, "parameter %s: %.200q is not %s", key, parameters[key], values[key])
		}
	}
	if v.OvercommitPercent > pool.NoOvercommit && v.Provisioning != pool.Thin {
		return v, state.Errorf(state.InvalidArgument, "parameter %s: only thin volumes can be overcommitted; add the parameter %s: %s", overcommitKey, provisioningKey, pool.Thin)
	}
	return v, nil
}

// set sets the fact that a parameter stands for.
func set(v *pool.Volume, key, value string) (known, good bool) {
	switch key {
	case provisioningKey:
		v.Provisioning = pool.Provisioning(value)
		return true, v.Provisioning == pool.Thick || v.Provisioning == pool.Thin
	case overcommitKey:
		v.OvercommitPercent = percent(value)
		return true, v.OvercommitPercent >= pool.NoOvercommit && v.OvercommitPercent <= pool.MaxOvercommit
	case sectorSizeKey:
		v.SectorBytes = map[string]int64{"512": 512, "4096": 4096}[value]
		return true, v.SectorBytes != 0
	}
	return false, false
}

// get is the inverse of set.
func get(v pool.Volume, key string) string {
	switch key {
	case provisioningKey:
		return string(v.Provisioning)
	case overcommitKey:
		return strconv.FormatFloat(float64(v.OvercommitPercent)/100, 'f', -1, 64)
	}
	if v.SectorBytes == 0 {
		return "by default"
	}
	return strconv.FormatInt(v.SectorBytes, 10)
}

// differs says which of the parameters two volumes differ in; empty if in none.
func differs(have, want pool.Volume, keys []string) string {
	for _, key := range keys {
		if h, w := get(have, key), get(want, key); h != w {
			return fmt.Sprintf("%s %s, not %s", key, h, w)
		}
	}
	return ""
}

// keys returns the names of the parameters.
func keys() []string { return slices.Sorted(maps.Keys(values)) }

// manual lists parameters and what they may be.
func manual(keys ...string) string {
	var list []string
	for _, key := range keys {
		list = append(list, key+": "+values[key])
	}
	return strings.Join(list, "; ")
}

var number = regexp.MustCompile(`^([0-9]{1,3})(?:\.([0-9]{1,2}))?$`)

// percent reads a number as 1 or 2.75; what is none is 0.
func percent(s string) int64 {
	m := number.FindStringSubmatch(s)
	if m == nil {
		return 0
	}
	n, _ := strconv.ParseInt(m[1]+(m[2] + "00")[:2], 10, 64) // three to five digits
	return n
}
