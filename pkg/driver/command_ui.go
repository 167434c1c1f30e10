package driver

import (
	"cmp"
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/ui"
)

func newUICommand(o Options) *cobra.Command {
	stateDir, port := "", uint16(0)
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Show this node and its volumes on a page for the browser",
		Long: `ui serves a page on this machine's loopback interface and prints its address. The
page shows what status and explain tell, live: what is asked of each volume and what
is, what is wrong and what to do, how full the storage is, and what happened while
the page was open. It changes nothing.

Only this machine can reach the page, and only whoever has the token that is in the
printed address. For a browser elsewhere forward the port, such as by ssh -L. The
plugin of kubectl has such a page of all nodes.`,
		Example: `  csi-node ui
  csi-node ui --port 8080`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			listener, err := ui.Listen(int(port))
			if err != nil {
				return err
			}
			return ui.Serve(cmd.Context(), listener, cmd.OutOrStdout(), ownPage(stateDir, o))
		},
	}
	addStateDir(cmd, o, &stateDir)
	cmd.Flags().Uint16Var(&port, "port", 0, "port of the loopback interface; 0: one that is free")
	return cmd
}

// ownPage shows this node.
func ownPage(stateDir string, o Options) ui.Source {
	return ui.Source{
		Title: o.program(),
		Every: watchEvery,
		Read: func(ctx context.Context) (ui.Snapshot, error) {
			ctx, cancel := context.WithTimeout(ctx, statusTime)
			defer cancel()
			node, err := ReadReport(ctx, stateDir, o)
			if err != nil {
				return ui.Snapshot{}, err
			}
			name, _ := os.Hostname() // where an older plugin does not name the node
			return ui.Snapshot{Cluster: report.Cluster{Nodes: []report.NodeOf{{Name: cmp.Or(node.NodeID, name, "this node"), Node: node}}}}, nil
		},
		Explain: func(ctx context.Context, _ report.NodeOf, volume string) (report.Explanation, error) {
			return readExplanation(ctx, stateDir, volume, o)
		},
	}
}
