package kubectl

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// driverLabel is the label of external-provisioner's CSIStorageCapacity objects that names
// the driver.
const driverLabel = "csi.storage.k8s.io/drivername"

// hashedNode is the topology value of a node whose name can be none.
var hashedNode = regexp.MustCompile(`^node-[0-9a-f]{32}$`)

// capacities are CSIStorageCapacity objects.
type capacities struct {
	Items []struct {
		Metadata         metadata
		NodeTopology     struct{ MatchLabels map[string]string }
		StorageClassName string

		Capacity, MaximumVolumeSize *resource.Quantity
	}
}

// most returns the largest volume of a class that there is room for, and on which node; empty:
// nobody tells.
func (all capacities) most(class string) (size resource.Quantity, node string) {
	for _, object := range all.Items {
		room := cmp.Or(object.MaximumVolumeSize, object.Capacity)
		if object.StorageClassName == class && room != nil && (node == "" || room.Cmp(size) > 0) {
			size, node = *room, strings.Join(slices.Sorted(maps.Values(object.NodeTopology.MatchLabels)), ", ")
		}
	}
	return size, node
}

// untold returns why a claim has no volume where no event does; empty: one may, or who asks
// may not read what would tell.
func (c *cluster) untold(ctx context.Context, of claim) string {
	var class struct{ Provisioner string }
	var nodes struct{ Items []csiNode }
	var room capacities
	name, size := of.Spec.StorageClassName, of.Spec.Resources.Requests.Storage
	if name == "" || c.get(ctx, &class, "storageclass", name) != nil || c.get(ctx, &nodes, "csinodes") != nil ||
		c.get(ctx, &room, "csistoragecapacities", "--all-namespaces", "--selector="+driverLabel+"="+class.Provisioner) != nil {
		return ""
	}
	most, node := room.most(name)
	switch {
	case !slices.ContainsFunc(nodes.Items, func(n csiNode) bool { return n.has(class.Provisioner) }):
		return fmt.Sprintf("its class %s names the provisioner %s, and no node has a CSI driver of that name (`kubectl get csinodes -o yaml`).", name, class.Provisioner)
	case node != "" && size.Cmp(most) > 0:
		return fmt.Sprintf("it asks for %s, and the most that any node has room for in its class %s is %s, on %s.", size.String(), name, state.FormatSize(most.Value()), node)
	}
	return ""
}

// staleRoom returns the room that is told of on nodes that have no pod of the plugin. It
// returns nothing unless it is sure of that: if not all pods are asked for, a node has not
// answered, or the cluster does not tell.
func (c *cluster) staleRoom(ctx context.Context, all report.Cluster) (stale []report.StaleRoom) {
	var room capacities
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
