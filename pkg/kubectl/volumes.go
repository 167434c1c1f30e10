package kubectl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/state"
)

// kept is a volume that a node keeps, in use or not. The JSON is the contract of volumes'
// --output json, a list of them.
type kept struct {
	Node   string `json:"node"`
	Pod    string `json:"pod"` // of the plugin there, as namespace/name
	Volume string `json:"volume"`
	Size   int64  `json:"size"`             // bytes
	PV     string `json:"pv,omitempty"`     // the PersistentVolume that names it
	Phase  string `json:"phase,omitempty"`  // of that
	Claim  string `json:"claim,omitempty"`  // that it is for, as namespace/name
	Inline bool   `json:"inline,omitempty"` // it is one of a pod, and has no PersistentVolume
}

// inlineID is the id of an inline volume, as inlineHandle makes it.
var inlineID = regexp.MustCompile(`^csi-[0-9a-f]{64}$`)

func (c *cluster) volumesCommand() *cobra.Command {
	var output command.Output
	var without bool
	cmd := &cobra.Command{
		Use:   "volumes",
		Short: "List the volumes that the nodes keep, in use or not",
		Long: `volumes asks csi-node on each node which volumes it keeps, as csi-node volume list does
there, and looks for the PersistentVolume of each. With --without-pv it lists those that
no PersistentVolume names: one may be made just now, be kept deliberately, or be left
over. Inline volumes, which never have one, are no such. It changes nothing; csi-node
volume delete on the node destroys a volume.`,
		Example: `  kubectl csi-node volumes
  kubectl csi-node volumes --without-pv`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			all, err := c.volumes(cmd.Context())
			if all == nil {
				return err
			}
			if without {
				all = slices.DeleteFunc(all, func(v kept) bool { return v.PV != "" || v.Inline })
			}
			return errors.Join(output.Print(cmd.OutOrStdout(), all, func(out io.Writer) { printVolumes(out, all) }), err)
		},
	}
	output.Add(cmd)
	cmd.Flags().BoolVar(&without, "without-pv", false, "only those that no PersistentVolume names, and no inline ones")
	return cmd
}

func printVolumes(out io.Writer, all []kept) {
	if len(all) == 0 {
		fmt.Fprintln(out, "There are no such volumes.")
		return
	}
	fmt.Fprintln(out, "NODE\tVOLUME\tSIZE\tCLAIM\tPV IS")
	for _, v := range all {
		is := cmp.Or(v.Phase, "missing")
		if v.Inline {
			is = "none: inline"
		}
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\t%s\n", v.Node, v.Volume, state.FormatSize(v.Size), cmp.Or(v.Claim, "-"), is)
	}
}

// volumes returns those of all nodes, and why not all nodes could be asked. It returns none if it
// cannot tell which PersistentVolumes there are.
func (c *cluster) volumes(ctx context.Context) ([]kept, error) {
	plugins, err := c.plugins(ctx)
	if err != nil {
		return nil, err
	}
	lists, errs := make([]volumeList, len(plugins)), make([]error, len(plugins))
	each(plugins, func(i int, p plugin) {
		if err := c.ask(ctx, p, &lists[i], "volume", "list", "--output=json", c.timeout()); err != nil {
			errs[i] = fmt.Errorf("node %s: %w", p.node, err)
		}
	})
	// They are listed after the volumes, because they are made after them.
	pvs, err := c.persistentVolumes(ctx)
	if err != nil {
		return nil, err
	}
	named := map[volumeOf][]persistentVolume{}
	for _, pv := range pvs {
		if csi := pv.Spec.CSI; csi != nil {
			for _, driver := range []string{csi.Driver, ""} { // the latter for a plugin without the label
				named[volumeOf{driver, csi.VolumeHandle}] = append(named[volumeOf{driver, csi.VolumeHandle}], pv)
			}
		}
	}
	all := []kept{}
	for i, p := range plugins {
		for _, entry := range lists[i].Entries {
			id := entry.Volume.VolumeID
			var pv persistentVolume
			of := named[volumeOf{p.driver, id}]
			if i := slices.IndexFunc(of, func(pv persistentVolume) bool { return pv.on(entry.Volume.AccessibleTopology) }); i >= 0 {
				pv = of[i]
			}
			v := kept{Node: p.node, Pod: p.pod(), Volume: id, Size: entry.Volume.CapacityBytes, PV: pv.Metadata.Name, Phase: pv.Status.Phase, Inline: inlineID.MatchString(id)}
			if claim := pv.Spec.ClaimRef; claim != nil {
				v.Claim = claim.Namespace + "/" + claim.Name
			}
			all = append(all, v)
		}
	}
	return all, errors.Join(errs...)
}

// on reports whether the volume of a PersistentVolume may be one that is told with a topology.
// On two nodes there may be volumes of one id: what is left of the one is not the other.
func (pv persistentVolume) on(topology []segments) bool {
	terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms
	return len(terms) == 0 || len(topology) == 0 || slices.ContainsFunc(terms, func(term nodeSelectorTerm) bool {
		return !slices.ContainsFunc(term.MatchExpressions, func(e matchExpression) bool {
			value, told := topology[0].Segments[e.Key]
			return told && e.Operator == "In" && !slices.Contains(e.Values, value)
		})
	})
}

type (
	nodeSelectorTerm struct{ MatchExpressions []matchExpression }
	matchExpression  struct {
		Key, Operator string
		Values        []string
	}
	// segments are a Topology of CSI.
	segments struct{ Segments map[string]string }
)

// volumeList is what csi-node volume list prints: a ListVolumesResponse.
type volumeList struct {
	Entries []struct {
		Volume struct {
			VolumeID      string `json:"volumeId"`
			CapacityBytes int64  `json:"capacityBytes,string"`

			AccessibleTopology []segments
		} `json:"volume"`
	} `json:"entries"`
}
