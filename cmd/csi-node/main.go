// Command csi-node is a CSI node plugin that remembers what it was asked,
// sees what is, and closes the difference.
package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
)

// version is set by the linker: -X main.version=v1.2.3.
var version = ""

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		fmt.Fprintf(os.Stderr, "csi-node: %v\n", err)
		os.Exit(exitCode(err))
	}
}

func newCommand() *cobra.Command {
	serve := newServeCommand()
	root := &cobra.Command{
		Use:   "csi-node",
		Short: "A CSI node plugin built around a reconciler",
		Long: `csi-node serves CSI volumes on one node: files in a pool directory, attached as
loop devices, formatted once, staged, bound into pods, grown while mounted.

Each call of kubelet becomes an intent in a small store; a reconciler makes the
node match the intents, and goes on after timeouts, crashes and restarts.
Without a subcommand it serves.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.`,
		Example: `  # Serve on a socket of your own, with volumes in a directory of your own:
  csi-node --endpoint unix:///tmp/csi.sock --state-dir /tmp/csi-state --pool-dir /tmp/csi-pool --kubelet-dir /tmp

  # In another terminal, see what is asked of this node and what is:
  csi-node status --state-dir /tmp/csi-state`,
		Args:          cobra.NoArgs,
		RunE:          serve.RunE,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.Flags().AddFlagSet(serve.Flags())
	root.AddGroup(&cobra.Group{ID: "plugin", Title: "The plugin:"}, &cobra.Group{ID: "hand", Title: "By hand:"}, &cobra.Group{ID: "more", Title: "More:"})
	for _, c := range []struct {
		group string
		cmd   *cobra.Command
	}{{"plugin", serve}, {"plugin", newStatusCommand()}, {"plugin", newExplainCommand()}, {"plugin", newOrphansCommand()}, {"plugin", newProbeCommand()}, {"hand", newVolumeCommand()}, {"hand", newDemoCommand()}, {"more", newVersionCommand()}} {
		c.cmd.GroupID = c.group
		root.AddCommand(c.cmd)
	}
	addCobraCommands(root)
	strict(root)
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return wrongUse("%w; `%s --help` lists the flags", err, c.CommandPath())
	})
	return root
}

// addCobraCommands adds help and completion, with examples that cobra lacks.
func addCobraCommands(root *cobra.Command) {
	cobra.EnableCommandSorting = false // the examples are in the order of a volume's life
	root.SetHelpCommandGroupID("more")
	root.SetCompletionCommandGroupID("more")
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	examples := map[string]string{
		"csi-node help":                  "  csi-node help volume create",
		"csi-node completion":            "  csi-node completion bash --help",
		"csi-node completion bash":       "  source <(csi-node completion bash)",
		"csi-node completion zsh":        "  source <(csi-node completion zsh)",
		"csi-node completion fish":       "  csi-node completion fish | source",
		"csi-node completion powershell": "  csi-node completion powershell | Out-String | Invoke-Expression",
	}
	for _, c := range root.Commands() {
		c.Example = cmp.Or(c.Example, examples[c.CommandPath()])
		for _, sub := range c.Commands() {
			sub.Example = cmp.Or(sub.Example, examples[sub.CommandPath()])
		}
	}
}

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version",
		Example: "  csi-node version",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), buildVersion())
			return err
		},
	}
}

// buildVersion is the version that the linker was given, else that of the module.
func buildVersion() string {
	if version != "" {
		return version
	}
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" && info.Main.Version != "(devel)" {
		return info.Main.Version
	}
	return "v0.0.0-dev"
}
