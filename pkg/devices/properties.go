package devices

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Properties are what a CO wants to know of a driver as a whole: one CSIDriver
// object, one set of capabilities. The kinds of one driver must agree on them.
type Properties struct {
	// NodeLocal: a volume is on one node, and pods have to go there. False: any
	// node with the driver reaches any volume.
	NodeLocal bool
	// AttachRequired: ControllerPublishVolume comes before a node may use a
	// volume. The driver's Controller offers that: driver.Options.Controller adds it.
	AttachRequired bool
	// CapacityTracked: GetCapacity is to be asked before a volume is placed.
	CapacityTracked bool
	// FSGroupPolicy is Kubernetes' word for who sets the group of files: File,
	// ReadWriteOnceWithFSType or None; empty: File.
	FSGroupPolicy string
	// VolumeLimit is how many volumes a node takes; 0: no limit.
	VolumeLimit int64
	// Inline: pods may ask for inline ephemeral volumes. It is true of a driver if it
	// is true of one of its kinds.
	Inline bool
}

// policies are the values of FSGroupPolicy.
var policies = []string{"File", "ReadWriteOnceWithFSType", "None"}

// Agree returns the properties that all kinds of one driver have. The error names
// the kind whose properties are invalid, or two kinds that differ, and in what.
func Agree(kinds []Kind) (p Properties, err error) {
	for i, k := range kinds {
		if policy := k.Properties.FSGroupPolicy; policy != "" && !slices.Contains(policies, policy) {
			return p, fmt.Errorf("the backend %s: FSGroupPolicy %q: there are %s", k.Name, policy, strings.Join(policies, ", "))
		}
		if k.Properties.VolumeLimit < 0 {
			return p, fmt.Errorf("the backend %s: VolumeLimit %d: must not be negative; 0 means no limit", k.Name, k.Properties.VolumeLimit)
		}
		if i == 0 {
			p = k.Properties
			p.FSGroupPolicy = cmp.Or(p.FSGroupPolicy, "File")
			continue
		}
		q := k.Properties
		p.Inline = p.Inline || q.Inline
		for _, property := range []struct {
			name       string
			one, other any
		}{
			{"NodeLocal", p.NodeLocal, q.NodeLocal},
			{"AttachRequired", p.AttachRequired, q.AttachRequired},
			{"CapacityTracked", p.CapacityTracked, q.CapacityTracked},
			{"FSGroupPolicy", p.FSGroupPolicy, cmp.Or(q.FSGroupPolicy, "File")},
			{"VolumeLimit", p.VolumeLimit, q.VolumeLimit},
		} {
			if property.one != property.other {
				return p, fmt.Errorf("the backends %s and %s cannot be of one driver: %s is %v of one and %v of the other, and Kubernetes knows one for a driver: give each a driver of its own",
					kinds[0].Name, k.Name, property.name, property.one, property.other)
			}
		}
	}
	return p, nil
}
