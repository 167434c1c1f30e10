package kubectl

import (
	"cmp"
	"context"
	"regexp"
	"slices"

	"github.com/csi-node/csi-node/pkg/report"
)

// driverLabel is the label of external-provisioner's CSIStorageCapacity objects that names
// the driver.
const driverLabel = "csi.storage.k8s.io/drivername"

// hashedNode is the topology value of a node whose name can be none.
var hashedNode = regexp.MustCompile(`^node-[0-9a-f]{32}$`)

// staleRoom returns the room that is told of on nodes that have no pod of the plugin. It
// returns nothing unless it is sure of that: if not all pods are asked for, a node has not
// answered, or the cluster does not tell.
func (c *cluster) staleRoom(ctx context.Context, all report.Cluster) (stale []report.StaleRoom) {
	var room struct {
		Items []struct {
			Metadata struct {
				Name, Namespace string
				Labels          map[string]string
			}
			NodeTopology struct{ MatchLabels map[string]string }
		}
	}
	if c.node != "" || c.selector != allPlugins || all.Err() != nil ||
		c.get(ctx, &room, "csistoragecapacities", "--all-namespaces", "--selector="+driverLabel) != nil || len(room.Items) == 0 {
		return nil
	}
	pods, err := c.pods(ctx)
	if err != nil {
		return nil
	}
	for _, object := range room.Items {
		driver := object.Metadata.Labels[driverLabel]
		for key, node := range object.NodeTopology.MatchLabels {
			ofDriver := func(n report.NodeOf) bool { return n.Driver == driver }
			isNode := func(n report.NodeOf) bool { return ofDriver(n) && n.NodeID == node }
			runsOn := func(p pod) bool { return p.Spec.NodeName == node }
			switch {
			case !slices.ContainsFunc(all.Nodes, ofDriver), slices.ContainsFunc(all.Nodes, isNode), slices.ContainsFunc(pods, runsOn),
				len(object.NodeTopology.MatchLabels) > 1, key != "topology."+driver+"/node" && key != driver+"/node", hashedNode.MatchString(node):
				continue
			}
			place := report.StaleRoom{Node: node, Driver: driver, Namespace: object.Metadata.Namespace}
			i := slices.IndexFunc(stale, func(s report.StaleRoom) bool {
				return s.Node == place.Node && s.Driver == place.Driver && s.Namespace == place.Namespace
			})
			if i < 0 {
				i, stale = len(stale), append(stale, place)
			}
			stale[i].Objects = append(stale[i].Objects, object.Metadata.Name)
		}
	}
	slices.SortStableFunc(stale, func(a, b report.StaleRoom) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Driver, b.Driver))
	})
	return stale
}
