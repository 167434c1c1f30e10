package driver

import (
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
)

func newProbeCommand(o Options) *cobra.Command {
	stateDir, timeout := "", command.Timeout(0)
	cmd := &cobra.Command{
		Use:   "probe live|ready",
		Short: "Ask whether the plugin lives or is ready, for a container's probes",
		Long: `probe asks the plugin that runs on the state directory: "live" is answered when
its CSI socket answers, "ready" when nothing is missing that it needs (tools, pool,
loop devices). The exit code is the answer; the reason is on standard error.

It asks over a socket in the state directory that only root can use: whoever can
reach --http-endpoint could keep that from answering, and so restart the plugin.`,
		Example: `  csi-node probe live --state-dir /tmp/csi-state
  csi-node probe ready --state-dir /tmp/csi-state --timeout 2s`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || args[0] != liveProbe && args[0] != readyProbe {
				return fmt.Errorf("`probe` takes one argument, %s or %s, not %q", liveProbe, readyProbe, args)
			}
			return nil
		},
		ValidArgs: []string{liveProbe, readyProbe},
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := timeout.Context(cmd)
			defer cancel()
			if err := askProbe(ctx, stateDir, args[0]); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "ok")
			return err
		},
	}
	addStateDir(cmd, o, &stateDir)
	timeout.Add(cmd, 5*time.Second, "the answer")
	return cmd
}
