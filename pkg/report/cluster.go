package report

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
)

// Cluster is the report of several nodes: what `kubectl csi-node status` prints. The
// JSON is the contract of its --output json.
type Cluster struct {
	Nodes     []NodeOf    `json:"nodes"`               // in the order of their names
	StaleRoom []StaleRoom `json:"staleRoom,omitempty"` // in the order of their nodes
}

// StaleRoom is room that CSIStorageCapacity objects tell of on a node without the plugin, such
// as one that was excluded: the scheduler still sends pods there.
type StaleRoom struct {
	Node      string   `json:"node"`
	Driver    string   `json:"driver"`
	Namespace string   `json:"namespace"` // of the objects
	Objects   []string `json:"objects"`   // their names
}

// NodeOf is the report of one of several nodes.
type NodeOf struct {
	Name  string `json:"name"`
	Pod   string `json:"pod"`             // of the plugin there, as namespace/name
	Error string `json:"error,omitempty"` // why the node could not be asked; then nothing else is known
	Node
}

func (s StaleRoom) tell() string {
	return fmt.Sprintf("On node %s the plugin of %s does not run, and CSIStorageCapacity objects still tell of room there, so that pods may be sent there in vain. If it is not to come back: `kubectl --namespace=%s delete csistoragecapacities %s`", s.Node, s.Driver, s.Namespace, strings.Join(s.Objects, " "))
}

// nodeWidth bounds the column of the nodes, as volumeWidth does that of the volumes.
const nodeWidth = 16

// Print writes the report as a table like that of a node, without what is asked.
func (c Cluster) Print(out io.Writer) error {
	_, err := io.WriteString(out, c.table(widthFor(out)))
	return err
}

func (c Cluster) table(width int) string {
	var text strings.Builder
	rows := []row{of("NODE", head)}
	left, empty := 0, "No volume is asked of these nodes."
	if len(c.Nodes) == 1 {
		empty = "No volume is asked of this node."
	}
	for _, n := range c.Nodes {
		left += n.left
		if n.Error != "" {
			empty = "No volume is known."
		}
		for _, r := range n.rows(time.Now()) {
			rows = append(rows, of(shortened(n.Name, nodeWidth), r))
		}
	}
	if len(rows) == 1 {
		text.WriteString(none(left, "the nodes that answered have", empty) + "\n")
	} else {
		align(&text, rows, width)
	}
	c.foot(&text, width)
	return text.String()
}

// of puts the name of a node before a row, in the place of what is asked.
func of(node string, r row) row {
	r.cells = slices.Insert(slices.Delete(slices.Clone(r.cells), askedCell, askedCell+1), 0, node)
	return r
}

// PrintWide writes the whole report of each node, and the room that is told of elsewhere.
func (c Cluster) PrintWide(out io.Writer) error {
	for i, n := range c.Nodes {
		if i > 0 {
			fmt.Fprintln(out)
		}
		if _, err := fmt.Fprintf(out, "Node %s (pod %s):\n", n.Name, n.Pod); err != nil {
			return err
		}
		if n.Error != "" {
			fmt.Fprintln(out, n.Error)
		} else if err := n.PrintWide(out); err != nil {
			return err
		}
	}
	for _, s := range c.StaleRoom {
		if _, err := fmt.Fprintf(out, "\n%s\n", s.tell()); err != nil {
			return err
		}
	}
	return nil
}

// foot tells what no part of a volume tells.
func (c Cluster) foot(text *strings.Builder, width int) {
	if slices.ContainsFunc(c.Nodes, func(n NodeOf) bool { return len(n.Refusals) > 0 }) {
		text.WriteString(refusedTitle)
	}
	for _, n := range c.Nodes {
		for _, told := range tellRefusals(n.Refusals, false, time.Now()) {
			write(text, "  ", "node "+n.Name+": "+told, width)
		}
	}
	for _, n := range c.Nodes {
		switch r := n.Registration; {
		case n.Error != "":
			write(text, "", fmt.Sprintf("Node %s could not be asked: %s", n.Name, n.Error), width)
		case !n.Running:
			write(text, "", fmt.Sprintf("On node %s no plugin answers.", n.Name), width)
		case r != nil && !r.Registered:
			write(text, "", fmt.Sprintf("Node %s: %s", n.Name, r.Tell()), width)
		}
		for _, problem := range n.StorageProblems {
			write(text, "", fmt.Sprintf("Node %s: storage: %s", n.Name, problem.tell()), width)
		}
		if n.Orphans > 0 {
			write(text, "", fmt.Sprintf("Node %s: %s", n.Name, n.tellOrphans("kubectl csi-node")), width)
		}
	}
	for _, s := range c.StaleRoom {
		write(text, "", s.tell(), width)
	}
}

// FillOf is how full a place of one of several nodes is.
type FillOf struct {
	Node string `json:"node"`
	Pod  string `json:"pod"` // of the plugin there, as namespace/name
	Fill
}

// Fills returns how full the places of all nodes are, the fullest first.
func (c Cluster) Fills() []FillOf {
	all := []FillOf{}
	for _, n := range c.Nodes {
		for _, place := range n.Storage {
			for _, fill := range place.Fills() {
				all = append(all, FillOf{n.Name, n.Pod, fill})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b FillOf) int { return cmp.Compare(b.Used, a.Used) })
	return all
}

// Err returns why not all nodes could be asked; nil: all were.
func (c Cluster) Err() error {
	var errs []error
	for _, n := range c.Nodes {
		if n.Error != "" {
			errs = append(errs, fmt.Errorf("node %s: %s", n.Name, n.Error))
		}
	}
	return errors.Join(errs...)
}
