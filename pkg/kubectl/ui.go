package kubectl

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/ui"
)

func (c *cluster) uiCommand() *cobra.Command {
	port := uint16(0)
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Show all nodes and their volumes on a page for the browser",
		Long: `ui serves a page on this machine's loopback interface and prints its address. The
page shows what status and explain tell of all nodes, live: what is asked of each
volume and what is, by claim and pod, what is wrong and what to do, how full the
storage is, and what happened while the page was open. It changes nothing.

Only this machine can reach the page, and only whoever has the token that is in the
printed address. The nodes are asked while a page is open, and no longer. To name
claims it lists PersistentVolumes; without the right to do that it does without.`,
		Example: `  kubectl csi-node ui
  kubectl csi-node ui --node worker-1 --port 8080`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			listener, err := ui.Listen(int(port))
			if err != nil {
				return err
			}
			return ui.Serve(cmd.Context(), listener, cmd.OutOrStdout(), c.page())
		},
	}
	cmd.Flags().Uint16Var(&port, "port", 0, "port of the loopback interface; 0: one that is free")
	return cmd
}

// page shows all nodes.
func (c *cluster) page() ui.Source {
	known := &claims{cluster: c}
	return ui.Source{
		Title: "kubectl csi-node",
		Every: watchEvery,
		Read: func(ctx context.Context) (ui.Snapshot, error) {
			all, _, err := c.status(ctx)
			if err != nil {
				return ui.Snapshot{}, err
			}
			s := ui.Snapshot{Cluster: all}
			if err := known.name(ctx, all); err != nil {
				s.Notes = []string{fmt.Sprintf("Claims are not named: %v", err)}
			}
			return s, nil
		},
		Explain: func(ctx context.Context, node report.NodeOf, volume string) (explanation report.Explanation, err error) {
			namespace, name, _ := strings.Cut(node.Pod, "/")
			err = c.ask(ctx, plugin{node: node.Name, namespace: namespace, name: name}, &explanation, "explain", "--output=json", "--", volume)
			return explanation, err
		},
	}
}

const (
	claimsEvery = time.Minute     // how often PersistentVolumes are listed at most
	claimsKept  = 5 * time.Minute // how long what was listed is taken for what is: a volume may be bound anew
)

// claims knows the claims of volumes. It is for one goroutine.
type claims struct {
	cluster *cluster
	of      map[volumeOf]owner
	err     error     // of the last listing
	asked   time.Time // when that was
}

// volumeOf names a volume in a cluster.
type volumeOf struct{ driver, volume string }

// owner is the claim of a volume, as namespace/name, and its StorageClass.
type owner struct{ claim, class string }

// name writes the claims into the report. It lists PersistentVolumes if it does not know
// all volumes, and has not asked just now. An inline volume has no claim, ever.
func (k *claims) name(ctx context.Context, all report.Cluster) error {
	if age := time.Since(k.asked); age > claimsKept || age > claimsEvery && !k.knows(all) {
		of, err := k.cluster.claims(ctx)
		k.err, k.asked = err, time.Now()
		if err == nil {
			k.of = of
		}
	}
	for _, n := range all.Nodes {
		for i, v := range n.Volumes {
			of := k.of[volumeOf{n.Driver, v.Volume}]
			n.Volumes[i].Claim, n.Volumes[i].Class = of.claim, of.class
		}
		for i, r := range n.Refusals {
			if of, is := k.of[volumeOf{n.Driver, r.Volume}]; is {
				n.Refusals[i].Claim, n.Refusals[i].Class = of.claim, of.class
			}
		}
	}
	return k.err
}

func (k *claims) knows(all report.Cluster) bool {
	for _, n := range all.Nodes {
		for _, v := range n.Volumes {
			if k.of[volumeOf{n.Driver, v.Volume}].claim == "" {
				return false
			}
		}
		for _, r := range n.Refusals {
			if k.of[volumeOf{n.Driver, r.Volume}].claim == "" {
				return false
			}
		}
	}
	return k.err == nil
}

// claims lists the claims of all volumes in the cluster.
func (c *cluster) claims(ctx context.Context) (map[volumeOf]owner, error) {
	volumes, err := c.persistentVolumes(ctx)
	all := map[volumeOf]owner{}
	for _, pv := range volumes {
		if csi, claim := pv.Spec.CSI, pv.Spec.ClaimRef; csi != nil && claim != nil {
			all[volumeOf{csi.Driver, csi.VolumeHandle}] = owner{claim.Namespace + "/" + claim.Name, pv.Spec.StorageClassName}
		}
	}
	return all, err
}
