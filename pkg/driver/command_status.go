package driver

import (
	"context"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
)

func newStatusCommand(o Options) *cobra.Command {
	var stateDir string
	var output command.Output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Compare the desired state of this node with the actual one",
		Long: `status asks the running plugin; if none runs it looks at the store and the kernel
itself. It changes nothing. Paths are left out where they are not needed to tell the
parts apart; explain and --output json have them.`,
		Example: `  csi-node status
  csi-node status --output json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := output.Check(); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), 10*time.Second)
			defer cancel()
			report, err := ReadReport(ctx, stateDir, o.Backends...)
			if err != nil {
				return err
			}
			return show(cmd.OutOrStdout(), output, report)
		},
	}
	addStateDir(cmd, o, &stateDir)
	output.Add(cmd)
	return cmd
}

// show prints a report in the format that was asked for.
func show(out io.Writer, format command.Output, report Report) error {
	if format == "json" {
		return format.Print(out, report, nil)
	}
	return report.Print(out)
}
