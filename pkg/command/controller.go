package command

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/client"
	"github.com/csi-node/csi-node/pkg/state"
)

func newCreateCommand() *cobra.Command {
	var f callFlags
	var access accessFlags
	var secrets secretFlag
	var bytes string
	var parameters []string
	cmd := &cobra.Command{
		Use:   "create NAME",
		Short: "Make a volume (CreateVolume)",
		Long: `create asks the controller service for a volume of that name, as the provisioner
does for a claim. It prints the volume's id, which the other commands take. The
same command again finds the same volume.`,
		Example: `  csi-node volume create try --size 320Mi
  csi-node volume create raw --size 64Mi --block`,
		Args: One("the NAME of the volume"),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := &csi.CreateVolumeRequest{Name: args[0]}
			var err, secretErr error
			req.Parameters, err = pairs("parameter", parameters)
			req.Secrets, secretErr = secrets.read()
			if err = cmp.Or(access.check(), err, secretErr); err != nil {
				return err
			}
			if bytes != "" {
				required, err := client.ParseSize(bytes)
				if err != nil {
					return WrongUse("--size: %w", err)
				}
				req.CapacityRange = &csi.CapacityRange{RequiredBytes: required}
			}
			return f.call(cmd, func(ctx context.Context, c *client.Client) error {
				capability, err := c.Capability(ctx, access.Access)
				if err != nil {
					return err
				}
				req.VolumeCapabilities = []*csi.VolumeCapability{capability}
				resp, err := c.Create(ctx, req)
				if err != nil {
					return err
				}
				v := resp.GetVolume()
				return f.output.Print(cmd.OutOrStdout(), Message{resp}, func(out io.Writer) {
					fmt.Fprintln(out, "VOLUME\tSIZE\tCONTEXT")
					fmt.Fprintf(out, "%s\t%s\t%s\n", v.GetVolumeId(), Size(v.GetCapacityBytes()), joined(v.GetVolumeContext()))
				})
			})
		},
		ValidArgsFunction: cobra.NoFileCompletions,
	}
	cmd.Flags().StringVar(&bytes, "size", "", "size, such as 1Gi, 500M or 1073741824 (default: the driver chooses)")
	cmd.Flags().StringArrayVar(&parameters, "parameter", nil, "parameter as key=value, like those of a StorageClass; may be given several times")
	Complete(cmd, "size", "1Gi", "10Gi", "100Gi")
	access.add(cmd)
	secrets.add(cmd)
	f.add(cmd)
	return cmd
}

func newDeleteCommand() *cobra.Command {
	var f callFlags
	var secrets secretFlag
	cmd := &cobra.Command{
		Use:   "delete VOLUME",
		Short: "Delete a volume and its data (DeleteVolume)",
		Long:  `delete asks the controller service to delete a volume with its data. A volume that does not exist is no error.`,
		Example: `  csi-node volume delete try
  csi-node volume delete raw`,
		RunE: func(cmd *cobra.Command, args []string) error {
			read, err := secrets.read()
			if err != nil {
				return err
			}
			return f.call(cmd, func(ctx context.Context, c *client.Client) error {
				if err := c.Delete(ctx, &csi.DeleteVolumeRequest{VolumeId: args[0], Secrets: read}); err != nil {
					return err
				}
				return f.done(cmd, outcome{Volume: args[0], Result: "deleted"}, "Volume %s is deleted.", args[0])
			})
		},
	}
	secrets.add(cmd)
	f.addVolume(cmd)
	return cmd
}

func newListCommand(own Own) *cobra.Command {
	var f callFlags
	stateDir := ""
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the driver's volumes (ListVolumes)",
		Long: `list prints all volumes that the controller service lists, on all pages, in the
order of their ids. Of its own volumes csi-node also knows how they were made, whether
what is asked of them on this node is so, and for which pods.`,
		Example: `  csi-node volume list
  csi-node volume list --output wide`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.call(cmd, func(ctx context.Context, c *client.Client) error {
				all, err := c.List(ctx)
				if err != nil {
					return err
				}
				slices.SortFunc(all, func(a, b *csi.ListVolumesResponse_Entry) int {
					return cmp.Compare(a.GetVolume().GetVolumeId(), b.GetVolume().GetVolumeId())
				})
				driver, err := c.DriverName(ctx)
				if err != nil {
					return err
				}
				details := own.Details(ctx, stateDir, driver)
				return f.output.Print(cmd.OutOrStdout(), Message{&csi.ListVolumesResponse{Entries: all}}, func(out io.Writer) { printList(out, all, details, f.output) })
			})
		},
	}
	f.addCall(cmd)
	f.output.AddWide(cmd)
	cmd.Flags().StringVar(&stateDir, "state-dir", own.StateDir, "csi-node's --state-dir, for what it knows of its own volumes; the environment's CSI_NODE_STATE_DIR is the default if set")
	return cmd
}

func printList(out io.Writer, all []*csi.ListVolumesResponse_Entry, details map[string]Detail, format Output) {
	switch {
	case len(all) == 0:
		fmt.Fprintln(out, "There are no volumes.")
		return
	case details == nil:
		fmt.Fprintln(out, "VOLUME\tSIZE")
	case format == Wide:
		fmt.Fprintln(out, "VOLUME\tSIZE\tBACKEND\tFILE SYSTEM\tPROVISIONING\tSTATE\tPODS\tCONTEXT")
	default:
		fmt.Fprintln(out, "VOLUME\tSIZE\tFILE SYSTEM\tPROVISIONING\tSTATE\tPODS")
	}
	for _, entry := range all {
		v := entry.GetVolume()
		d := details[v.GetVolumeId()]
		pods := cmp.Or(strings.Join(d.Pods, ", "), "-")
		cells := []string{v.GetVolumeId(), Size(v.GetCapacityBytes())}
		switch {
		case details != nil && format == Wide:
			cells = append(cells, d.Backend, d.Filesystem, cmp.Or(d.Provisioning, "-"), cmp.Or(d.State, "-"), pods, cmp.Or(joined(v.GetVolumeContext()), "-"))
		case details != nil:
			cells = []string{v.GetVolumeId(), state.FormatSize(v.GetCapacityBytes()), d.Filesystem, cmp.Or(d.Provisioning, "-"), cmp.Or(d.State, "-"), pods}
		}
		fmt.Fprintln(out, strings.Join(cells, "\t"))
	}
}

func newCapabilitiesCommand() *cobra.Command {
	var f callFlags
	cmd := &cobra.Command{
		Use:     "capabilities",
		Short:   "Show what the plugin reports about itself",
		Long:    `capabilities shows the driver's name, whether it is ready, the capabilities of its services, and what it reports about the node.`,
		Example: `  csi-node volume capabilities`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.call(cmd, func(ctx context.Context, c *client.Client) error {
				o, err := c.Offer(ctx)
				if err != nil {
					return err
				}
				value := struct {
					Info       Message `json:"info"`
					NotReady   string  `json:"notReady,omitempty"`
					Plugin     Message `json:"plugin"`
					Controller Message `json:"controller"`
					Node       Message `json:"node"`
					NodeInfo   Message `json:"nodeInfo"`
				}{Message{o.Info}, o.NotReady, Message{o.Plugin}, Message{o.Controller}, Message{o.Node}, Message{o.NodeInfo}}
				return f.output.Print(cmd.OutOrStdout(), value, func(out io.Writer) { printOffer(out, o) })
			})
		},
	}
	f.add(cmd)
	return cmd
}

func printOffer(out io.Writer, o *client.Offer) {
	row := func(what, text string) {
		if text != "" {
			fmt.Fprintf(out, "%s\t%s\n", what, text)
		}
	}
	row("driver", o.Info.GetName())
	row("version", o.Info.GetVendorVersion())
	row("ready", map[bool]string{true: "yes", false: "no: " + o.NotReady}[o.NotReady == ""])
	for _, c := range o.Plugin.GetCapabilities() {
		if c.GetVolumeExpansion() != nil {
			row("plugin", "VolumeExpansion "+c.GetVolumeExpansion().GetType().String())
		} else {
			row("plugin", c.GetService().GetType().String())
		}
	}
	for _, c := range o.Controller.GetCapabilities() {
		row("controller", c.GetRpc().GetType().String())
	}
	for _, c := range o.Node.GetCapabilities() {
		row("node", c.GetRpc().GetType().String())
	}
	row("node id", o.NodeInfo.GetNodeId())
	if limit := o.NodeInfo.GetMaxVolumesPerNode(); limit > 0 {
		row("volumes at most", fmt.Sprint(limit))
	}
	row("topology", joined(o.NodeInfo.GetAccessibleTopology().GetSegments()))
}
