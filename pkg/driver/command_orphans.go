package driver

import (
	"cmp"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/reconciler"
)

func newOrphansCommand(o Options) *cobra.Command {
	var f pluginFlags
	var clean bool
	cmd := &cobra.Command{
		Use:   "orphans",
		Short: "List devices and mounts of the plugin that no record explains",
		Long: `orphans lists loop devices and mounts of the plugin's volumes that nothing in its
store asks for, such as after the store was lost, and says why each of them stays.
Volumes, their files and their data are never orphans.

Without --clean it changes nothing, and looks by itself if no plugin runs. With
--clean the running plugin detaches those devices that nobody uses; nothing that
is mounted, bound or open where it can be seen is touched. A raw volume that is
staged and not published looks like an orphan, too: detached, it must be staged anew.`,
		Example: `  csi-node orphans
  csi-node orphans --clean`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := f.timeout.Context(cmd)
			defer cancel()
			var found []reconciler.Orphan
			var err error
			if clean {
				found, err = cleanOrphans(ctx, f.stateDir)
			} else {
				found, err = readOrphans(ctx, f.stateDir, o)
			}
			if err != nil {
				return fmt.Errorf("orphans: %w", err)
			}
			return f.output.Print(cmd.OutOrStdout(), found, func(out io.Writer) { printOrphans(out, found) })
		},
	}
	cmd.Flags().BoolVar(&clean, "clean", false, "detach the devices that nobody uses")
	f.add(cmd, o, 30*time.Second)
	return cmd
}

func printOrphans(out io.Writer, found []reconciler.Orphan) {
	if len(found) == 0 {
		fmt.Fprintln(out, "No orphans: an intent explains every device and mount of the plugin's.")
		return
	}
	for _, o := range found { // no table: paths of kubelet are longer than a line
		state := "stays: " + o.Kept
		switch {
		case o.Cleaned:
			state = "detached"
		case o.Kept == "":
			state = "nobody uses it now: `csi-node orphans --clean` detaches it"
		}
		fmt.Fprintf(out, "%s on %s\n", cmp.Or(o.Volume, "an unknown volume"), o.Device)
		for _, path := range o.Paths {
			fmt.Fprintf(out, "    mounted at %s\n", path)
		}
		fmt.Fprintf(out, "    %s\n", state)
	}
}
