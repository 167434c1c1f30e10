package report

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Place is what a backend measured of the place that its volumes are in. The values are
// those of its metrics (csi_node_BACKEND_NAME).
type Place struct {
	Backend string    `json:"backend"`
	Seen    time.Time `json:"seen"` // when it was measured: long ago if it hangs or is away
	Values  []Value   `json:"values"`
}

// Value is one value of a Place.
type Value struct {
	Name   string            `json:"name"` // with its unit, such as free_bytes
	Help   string            `json:"help"` // what it is, in a sentence
	Labels map[string]string `json:"labels,omitempty"`
	Value  float64           `json:"value"`
}

// Fill is how full a place is.
type Fill struct {
	Name string  `json:"name"` // such as "pool" or "lvm vg0"
	Used float64 `json:"used"` // from 0 to 1
	Text string  `json:"text"` // such as "58Gi of 100Gi free, 53Gi for new volumes", and when that was if it was long ago
}

// oldMeasure is how old a measurement is that was not made for who asks: the place hangs or
// is away. It leaves room for clocks that differ.
const oldMeasure = time.Minute

// Fills returns how full the place is, or each part of it. It knows the measurements that
// all backends can make (size_bytes, free_bytes, available_bytes) and those of thin pools.
// For a place without them it returns nothing.
func (p Place) Fills() []Fill {
	var fills []Fill
	var names []string
	values := map[string]map[string]float64{}
	for _, v := range p.Values {
		name := p.Backend
		for _, label := range slices.Sorted(maps.Keys(v.Labels)) {
			name += " " + v.Labels[label]
		}
		if values[name] == nil {
			values[name] = map[string]float64{}
			names = append(names, name)
		}
		values[name][v.Name] = v.Value
	}
	was := ""
	if age := time.Since(p.Seen); !p.Seen.IsZero() && age > oldMeasure {
		was = " when last measured, " + age.Round(time.Second).String() + " ago"
	}
	for _, name := range names {
		have := values[name]
		size, sized := have["size_bytes"]
		free, freed := have["free_bytes"]
		thin, isThin := have["thin_pool_size_bytes"]
		switch data := have["thin_pool_data_used_ratio"]; {
		case sized && freed && size > 0:
			fills = append(fills, Fill{name, within((size - free) / size), fill(free, size, have, "available_bytes") + was})
		case isThin:
			fills = append(fills, Fill{name, within(data), fill(thin*(1-data), thin, have, "thin_pool_available_bytes") + was})
		}
	}
	return fills
}

func fill(free, size float64, have map[string]float64, available string) string {
	text := fmt.Sprintf("%s of %s free", state.FormatSize(int64(free)), state.FormatSize(int64(size)))
	if left, known := have[available]; known {
		text += fmt.Sprintf(", %s for new volumes", state.FormatSize(int64(left)))
	}
	return text
}

func within(share float64) float64 { return min(max(share, 0), 1) }
