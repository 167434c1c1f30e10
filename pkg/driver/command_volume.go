package driver

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/reconciler"
)

// pluginFlags are the flags of the commands that ask csi-node itself.
type pluginFlags struct {
	stateDir string
	timeout  command.Timeout
	output   command.Output
}

func (f *pluginFlags) add(cmd *cobra.Command, o Options, timeout time.Duration) {
	addStateDir(cmd, o, &f.stateDir)
	f.timeout.Add(cmd, timeout, "the plugin")
	f.output.Add(cmd)
}

func addStateDir(cmd *cobra.Command, o Options, dir *string) {
	cmd.Flags().StringVar(dir, "state-dir", o.stateDir(), "the plugin's --state-dir; the environment's CSI_NODE_STATE_DIR is the default if set")
}

func newRetryCommand(o Options) *cobra.Command {
	var f pluginFlags
	cmd := &cobra.Command{
		Use:   "retry VOLUME",
		Short: "Retry now what fails (csi-node only)",
		Long: `retry ends the back-off of a volume: the plugin makes an attempt at once, and
retry prints the result, as status does. It exits with 0 if everything that is
asked of the volume is settled then.

It asks the plugin on --state-dir, and so works with csi-node only.`,
		Example: `  csi-node volume retry try`,
		Args:    command.One("the id of the VOLUME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := f.timeout.Context(cmd)
			defer cancel()
			report, err := Retry(ctx, f.stateDir, args[0])
			if err != nil {
				return fmt.Errorf("retry volume %s: %w", args[0], err)
			}
			err = f.output.PrintTables(cmd.OutOrStdout(), report)
			if failed := report.Unsettled(); err == nil && len(failed) > 0 {
				err = fmt.Errorf("retry volume %s: %s", args[0], strings.Join(failed, "; "))
			}
			return err
		},
		ValidArgsFunction: completeAsked(&f.stateDir, o),
	}
	f.add(cmd, o, 2*time.Minute)
	return cmd
}

// confirmFlag is the flag without which clear-device changes nothing.
const confirmFlag = "i-understand-this-destroys-data"

func newClearDeviceCommand(o Options) *cobra.Command {
	var f pluginFlags
	var sure bool
	cmd := &cobra.Command{
		Use:   "clear-device VOLUME",
		Short: "Destroy what is on a volume, so that it is blank again (csi-node only)",
		Long: `clear-device is for a volume that the plugin refuses to format because it is not
blank, or was published as a raw block device. It shows what is on the volume, and
with --` + confirmFlag + ` makes every byte of it zero and
forgets that the volume was ever formatted or published raw: the next stage formats
it like a new one. This cannot be undone.

Without the flag it changes nothing and exits with 1. It refuses a volume that
is staged, published or attached, or whose file somebody has open. It asks the
plugin on --state-dir, which lets nothing else use the volume meanwhile.`,
		Example: `  # See what would be destroyed (exits with 1):
  csi-node volume clear-device try

  csi-node volume clear-device try --` + confirmFlag,
		Args: command.One("the id of the VOLUME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, cancel := f.timeout.Context(cmd)
			defer cancel()
			act := inspectDevice
			if sure {
				act = clearDevice
			}
			c, err := act(ctx, f.stateDir, args[0])
			if err != nil {
				return fmt.Errorf("clear the device of volume %s: %w", args[0], err)
			}
			err = f.output.Print(cmd.OutOrStdout(), c, func(out io.Writer) { printClearance(out, c) })
			if err == nil && !c.Cleared {
				err = fmt.Errorf("volume %s: nothing was changed; --%s destroys what is on it", c.Volume, confirmFlag)
			}
			return err
		},
		ValidArgsFunction: command.CompleteVolume,
	}
	cmd.Flags().BoolVar(&sure, confirmFlag, false, "do it")
	f.add(cmd, o, 2*time.Minute)
	return cmd
}

func printClearance(out io.Writer, c reconciler.Clearance) {
	fmt.Fprintf(out, "volume\t%s\n", c.Volume)
	fmt.Fprintf(out, "data\t%s\n", c.Backing)
	fmt.Fprintf(out, "size\t%s\n", command.Size(c.Bytes))
	found := c.Found
	if c.UUID != "" {
		found += fmt.Sprintf(", UUID %s, %s", c.UUID, command.Size(c.FilesystemBytes))
	}
	fmt.Fprintf(out, "found\t%s\n", found)
	switch {
	case c.Formatting:
		fmt.Fprintf(out, "formatted\tinterrupted: the next mount erases it and formats it again\n")
	case c.Formatted != "":
		fmt.Fprintf(out, "formatted\tas %s\n", c.Formatted)
	default:
		fmt.Fprintf(out, "formatted\tnever by the plugin\n")
	}
	if c.Raw {
		fmt.Fprintf(out, "raw\tpublished as a raw block device before\n")
	}
	if c.Cleared {
		fmt.Fprintf(out, "result\tevery byte is zero; the next stage formats the volume like a new one\n")
	} else {
		fmt.Fprintf(out, "would do\tmake every byte zero, and forget that it was ever formatted or published raw\n")
	}
}

// completeAsked offers the ids of the volumes that the plugin on a state directory has been
// asked for, also of those of which the call was refused; none if it does not answer soon.
func completeAsked(stateDir *string, o Options) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), command.CompletionTime)
		defer cancel()
		node, _ := ReadReport(ctx, *stateDir, o) // completion cannot report an error
		return node.IDs(), cobra.ShellCompDirectiveNoFileComp
	}
}
