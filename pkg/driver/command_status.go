package driver

import (
	"context"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/report"
)

// statusTime bounds one reading of the report, and watchEvery is how often --watch reads.
const (
	statusTime = 10 * time.Second
	watchEvery = 2 * time.Second
)

func newStatusCommand(o Options) *cobra.Command {
	var stateDir string
	var output command.Output
	var filter report.Filter
	var watch bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Compare the desired state of this node with the actual one",
		Long: `status asks the running plugin; if none runs it looks at the store and the kernel
itself. It changes nothing. The table has a row for each part of a volume, what is
wrong beneath it, and the calls that were refused within the last hour; --output wide
has paths and devices, too. With --watch it prints again whenever something changed.`,
		Example: `  csi-node status
  csi-node status --failing
  csi-node status --pod default/writer --output wide
  csi-node status --volume try --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			read := func(ctx context.Context) (report.Node, error) {
				ctx, cancel := context.WithTimeout(ctx, statusTime)
				defer cancel()
				node, err := ReadReport(ctx, stateDir, o)
				return node.Pick(filter), err
			}
			if watch {
				return command.Watch(cmd, watchEvery, output, read, report.Node.WithoutAges, func(node report.Node) error { return output.PrintTables(cmd.OutOrStdout(), node) })
			}
			node, err := read(cmd.Context())
			if err != nil {
				return err
			}
			return output.PrintTables(cmd.OutOrStdout(), node)
		},
	}
	addStateDir(cmd, o, &stateDir)
	output.AddWide(cmd)
	f := cmd.Flags()
	f.StringArrayVar(&filter.Volumes, "volume", nil, "only the volume of this id; may be given several times")
	f.StringVar(&filter.Pod, "pod", "", "only volumes of this pod: namespace/name, or a name")
	f.BoolVar(&filter.Failing, "failing", false, "only volumes that are not as asked, or for which a call was refused")
	f.BoolVarP(&watch, "watch", "w", false, "print again whenever something changed, until interrupted")
	command.CompleteBy(cmd, "volume", completeAsked(&stateDir, o))
	return cmd
}
