package driver

import (
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
)

func newExplainCommand(o Options) *cobra.Command {
	var f pluginFlags
	cmd := &cobra.Command{
		Use:   "explain VOLUME",
		Short: "Explain the state of one volume in sentences",
		Long: `explain tells what was asked of a volume and when, what is there, what is
missing, what the plugin does about it, what prevents it, and what a person can do.
It changes nothing.

It asks the running plugin; if none runs it looks at the store and the kernel
itself.`,
		Example: `  csi-node explain try`,
		Args:    command.One("the id of the VOLUME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := f.timeout.Context(cmd)
			defer cancel()
			explanation, err := readExplanation(ctx, f.stateDir, args[0], o)
			if err != nil {
				return fmt.Errorf("explain volume %s: %w", args[0], err)
			}
			return f.output.Print(cmd.OutOrStdout(), explanation, func(out io.Writer) { _ = explanation.Print(out) })
		},
		ValidArgsFunction: completeAsked(&f.stateDir, o),
	}
	f.add(cmd, o, 10*time.Second)
	return cmd
}
