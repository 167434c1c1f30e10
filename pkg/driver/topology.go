package driver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"

	"github.com/container-storage-interface/spec/lib/go/csi"
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

// withTopology is a node service whose NodeGetInfo also returns the topology segments of the
// driver's builder. The engine's own segment, which names the node, is returned only
// if the volumes of the driver are local to a node.
type withTopology struct {
	csi.NodeServer
	local bool
	more  func(ctx context.Context) (map[string]string, error) // may be nil
}

func (s withTopology) NodeGetInfo(ctx context.Context, req *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	resp, err := s.NodeServer.NodeGetInfo(ctx, req)
	if err != nil || s.local && s.more == nil {
		return resp, err
	}
	segments := map[string]string{}
	if s.local {
		maps.Copy(segments, resp.GetAccessibleTopology().GetSegments())
	}
	if s.more != nil {
		more, err := s.more(ctx)
		if err != nil {
			return nil, fmt.Errorf("the topology of this node: %w", err)
		}
		maps.Copy(segments, more)
	}
	resp.AccessibleTopology = nil
	if len(segments) > 0 {
		resp.AccessibleTopology = &csi.Topology{Segments: segments}
	}
	return resp, nil
}
