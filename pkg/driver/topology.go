package driver

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
)

// CSI spec v1.13, Topology, and Kubernetes, which makes node labels of it: the
// prefix of a key and a value have at most 63 characters each, and a value
// begins and ends with a letter or digit.
const maxSegment = 63

var segmentValue = regexp.MustCompile(`^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$`)

// topologyKey is the key of the segment that names the node.
func topologyKey(driverName string) string {
	if prefix := "topology." + driverName; len(prefix) <= maxSegment {
		return prefix + "/node"
	}
	return driverName + "/node"
}

// topologyValue is the name of a node in its segment: its id if that is a valid
// value, else a name derived from it. An id may have 256 bytes of any kind.
func topologyValue(nodeID string) string {
	if len(nodeID) <= maxSegment && segmentValue.MatchString(nodeID) {
		return nodeID
	}
	sum := sha256.Sum256([]byte(nodeID))
	return "node-" + hex.EncodeToString(sum[:16])
}

// topology returns the segment that names the node, if the driver's volumes are local to one;
// nil: they are accessible from everywhere.
func (p *plugin) topology() map[string]string {
	if !p.properties.NodeLocal {
		return nil
	}
	return map[string]string{topologyKey(p.DriverName): topologyValue(p.NodeID)}
}
