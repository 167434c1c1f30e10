package kubectl

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/report"
)

// The labels that external-provisioner gives to its CSIStorageCapacity objects, and what ends
// the key of the one topology segment of an object that tells of one node's room.
const (
	driverLabel  = "csi.storage.k8s.io/drivername"
	managerLabel = "csi.storage.k8s.io/managed-by"
	nodeSegment  = "/node"
)

// staleRoom returns the room that is told of on nodes that have none of the plugins; nothing
// if the nodes are limited, or the cluster does not tell.
func (c *cluster) staleRoom(ctx context.Context, all report.Cluster, plugins []plugin) (stale []report.StaleRoom) {
	var list struct {
		Items []struct {
			Metadata struct {
				Namespace string
				Labels    map[string]string
			}
			NodeTopology struct{ MatchLabels map[string]string }
		}
	}
	if c.node != "" || c.get(ctx, &list, "csistoragecapacities", "--all-namespaces", "--selector="+driverLabel) != nil {
		return nil
	}
	for _, item := range list.Items {
		driver := item.Metadata.Labels[driverLabel]
		ours := slices.ContainsFunc(all.Nodes, func(n report.NodeOf) bool { return n.Driver == driver })
		for key, node := range item.NodeTopology.MatchLabels {
			runs := slices.ContainsFunc(plugins, func(p plugin) bool { return p.node == node })
			if !ours || runs || len(item.NodeTopology.MatchLabels) > 1 || !strings.HasSuffix(key, nodeSegment) {
				continue
			}
			selector := driverLabel + "=" + driver + "," + managerLabel + "=" + item.Metadata.Labels[managerLabel]
			stale = append(stale, report.StaleRoom{Node: node, Driver: driver, Namespace: item.Metadata.Namespace, Selector: selector})
		}
	}
	slices.SortFunc(stale, func(a, b report.StaleRoom) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Driver, b.Driver))
	})
	return slices.Compact(stale)
}
