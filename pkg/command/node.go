package command

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/client"
)

func newStageCommand() *cobra.Command {
	var f callFlags
	var p pathFlags
	var access accessFlags
	var secrets secretFlag
	var contexts contextFlags
	cmd := &cobra.Command{
		Use:   "stage VOLUME",
		Short: "Attach, format if it is blank, and mount a volume once on the node (NodeStageVolume)",
		Long: `stage makes the staging directory and asks the node service to stage the volume
there. If the driver has no stage, it does nothing and says so.`,
		Example: `  csi-node volume stage try
  csi-node volume stage raw --block`,
		RunE: func(cmd *cobra.Command, args []string) error {
			volumeContext, publishContext, contextErr := contexts.read()
			read, secretErr := secrets.read()
			if err := cmp.Or(access.check(), contextErr, secretErr); err != nil {
				return err
			}
			return f.callAt(cmd, &p, args[0], func(ctx context.Context, c *client.Client, paths client.Paths) error {
				if paths.Staging == "" {
					return f.doesNotStage(cmd, args[0])
				}
				capability, err := c.Capability(ctx, access.Access)
				if err != nil {
					return err
				}
				err = c.Stage(ctx, &csi.NodeStageVolumeRequest{
					VolumeId: args[0], StagingTargetPath: paths.Staging, VolumeCapability: capability, VolumeContext: volumeContext, PublishContext: publishContext, Secrets: read,
				})
				if err != nil {
					return err
				}
				return f.done(cmd, outcome{Volume: args[0], Staging: paths.Staging, Result: "staged"}, "Volume %s is staged at %s.", args[0], paths.Staging)
			})
		},
	}
	access.add(cmd)
	contexts.add(cmd)
	secrets.add(cmd)
	p.add(cmd)
	p.addStaging(cmd)
	f.addVolume(cmd)
	return cmd
}

func (f *callFlags) doesNotStage(cmd *cobra.Command, volume string) error {
	return f.done(cmd, outcome{Volume: volume, Result: "nothing to do: the driver does not stage volumes"},
		"There is nothing to do: the driver does not stage volumes, it publishes them at once.")
}

// contextFlags are the contexts that a node needs and that other calls returned.
type contextFlags struct{ volume, publish []string }

func (c *contextFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringArrayVar(&c.volume, "context", nil, "volume context as key=value, as volume create printed it; may be given several times")
	cmd.Flags().StringArrayVar(&c.publish, "publish-context", nil, "publish context as key=value, as ControllerPublishVolume answered it; may be given several times")
}

func (c *contextFlags) read() (volume, publish map[string]string, err error) {
	if volume, err = pairs("context", c.volume); err == nil {
		publish, err = pairs("publish-context", c.publish)
	}
	return volume, publish, err
}

func newPublishCommand() *cobra.Command {
	var f callFlags
	var p pathFlags
	var access accessFlags
	var secrets secretFlag
	var contexts contextFlags
	var readOnly bool
	cmd := &cobra.Command{
		Use:   "publish VOLUME",
		Short: "Bind a staged volume where a pod would see it (NodePublishVolume)",
		Long: `publish makes the target's parents and asks the node service to publish the volume
at the target: a directory, or a device file with --block.`,
		Example: `  csi-node volume publish try
  csi-node volume publish raw --block --read-only`,
		RunE: func(cmd *cobra.Command, args []string) error {
			volumeContext, publishContext, contextErr := contexts.read()
			read, secretErr := secrets.read()
			if err := cmp.Or(access.check(), contextErr, secretErr); err != nil {
				return err
			}
			return f.callAt(cmd, &p, args[0], func(ctx context.Context, c *client.Client, paths client.Paths) error {
				capability, err := c.Capability(ctx, access.Access)
				if err != nil {
					return err
				}
				err = c.Publish(ctx, &csi.NodePublishVolumeRequest{
					VolumeId: args[0], StagingTargetPath: paths.Staging, TargetPath: paths.Target, VolumeCapability: capability,
					Readonly: readOnly, VolumeContext: volumeContext, PublishContext: publishContext, Secrets: read,
				})
				if err != nil {
					return err
				}
				return f.done(cmd, outcome{args[0], paths.Staging, paths.Target, "published"}, "Volume %s is published at %s.", args[0], paths.Target)
			})
		},
	}
	cmd.Flags().BoolVar(&readOnly, "read-only", false, "nobody may write through the target")
	access.add(cmd)
	contexts.add(cmd)
	secrets.add(cmd)
	p.add(cmd)
	p.addStaging(cmd)
	p.addTarget(cmd)
	f.addVolume(cmd)
	return cmd
}

func newUnpublishCommand() *cobra.Command {
	var f callFlags
	var p pathFlags
	cmd := &cobra.Command{
		Use:   "unpublish VOLUME",
		Short: "Take a volume away from where a pod would see it (NodeUnpublishVolume)",
		Long: `unpublish asks the node service to take the volume away from the target, and
removes the volume's directory beside a default target if it is empty. A volume
that is not published is no error.`,
		Example: `  csi-node volume unpublish try
  csi-node volume unpublish raw`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.callAt(cmd, &p, args[0], func(ctx context.Context, c *client.Client, paths client.Paths) error {
				if err := c.Unpublish(ctx, args[0], paths); err != nil {
					return err
				}
				return f.done(cmd, outcome{Volume: args[0], Target: paths.Target, Result: "unpublished"}, "Volume %s is not published at %s any more.", args[0], paths.Target)
			})
		},
	}
	p.add(cmd)
	p.addTarget(cmd)
	f.addVolume(cmd)
	return cmd
}

func newUnstageCommand() *cobra.Command {
	var f callFlags
	var p pathFlags
	cmd := &cobra.Command{
		Use:   "unstage VOLUME",
		Short: "Unmount a volume and detach it from the node (NodeUnstageVolume)",
		Long: `unstage asks the node service to unstage the volume, and removes a default
staging path and the volume's directory if they are empty. A volume that is not
staged is no error.`,
		Example: `  csi-node volume unstage try
  csi-node volume unstage raw`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.callAt(cmd, &p, args[0], func(ctx context.Context, c *client.Client, paths client.Paths) error {
				if paths.Staging == "" {
					return f.doesNotStage(cmd, args[0])
				}
				if err := c.Unstage(ctx, args[0], paths); err != nil {
					return err
				}
				return f.done(cmd, outcome{Volume: args[0], Staging: paths.Staging, Result: "unstaged"}, "Volume %s is not staged at %s any more.", args[0], paths.Staging)
			})
		},
	}
	p.add(cmd)
	p.addStaging(cmd)
	f.addVolume(cmd)
	return cmd
}

func newExpandCommand() *cobra.Command {
	var f callFlags
	var p pathFlags
	var access accessFlags
	var secrets secretFlag
	var bytes string
	cmd := &cobra.Command{
		Use:   "expand VOLUME --size SIZE",
		Short: "Grow a volume (ControllerExpandVolume, NodeExpandVolume)",
		Long: `expand asks the controller service to grow the volume, if the driver offers that,
and then the node service. A volume never shrinks; one that is large enough is
left as it is.`,
		Example: `  csi-node volume expand try --size 400Mi`,
		RunE: func(cmd *cobra.Command, args []string) error {
			read, secretErr := secrets.read()
			if err := cmp.Or(access.check(), secretErr); err != nil {
				return err
			}
			required, err := client.ParseSize(bytes)
			if err != nil {
				return WrongUse("--size: %w", err)
			}
			return f.callAt(cmd, &p, args[0], func(ctx context.Context, c *client.Client, paths client.Paths) error {
				capability, err := c.Capability(ctx, access.Access)
				if err != nil {
					return err
				}
				grown, err := c.Expand(ctx, &csi.NodeExpandVolumeRequest{
					VolumeId: args[0], VolumePath: cmp.Or(p.shown, paths.Shown()), StagingTargetPath: paths.Staging, VolumeCapability: capability,
					CapacityRange: &csi.CapacityRange{RequiredBytes: required}, Secrets: read,
				})
				if err != nil {
					return err
				}
				return f.output.Print(cmd.OutOrStdout(), Message{&csi.NodeExpandVolumeResponse{CapacityBytes: grown}}, func(out io.Writer) {
					fmt.Fprintln(out, "VOLUME\tSIZE")
					fmt.Fprintf(out, "%s\t%s\n", args[0], Size(grown))
				})
			})
		},
	}
	cmd.Flags().StringVar(&bytes, "size", "", "size that the volume must at least have, such as 2Gi")
	Complete(cmd, "size", "1Gi", "10Gi", "100Gi")
	access.add(cmd)
	secrets.add(cmd)
	p.addAll(cmd)
	f.addVolume(cmd)
	return cmd
}

func newStatsCommand() *cobra.Command {
	var f callFlags
	var p pathFlags
	cmd := &cobra.Command{
		Use:     "stats VOLUME",
		Short:   "Show how full a volume is (NodeGetVolumeStats)",
		Long:    `stats asks the node service how many bytes and inodes the volume has, at a path where it is staged or published.`,
		Example: `  csi-node volume stats try`,
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.callAt(cmd, &p, args[0], func(ctx context.Context, c *client.Client, paths client.Paths) error {
				path := cmp.Or(p.shown, paths.Shown())
				resp, age, err := c.Stats(ctx, &csi.NodeGetVolumeStatsRequest{VolumeId: args[0], VolumePath: path, StagingTargetPath: paths.Staging})
				if err != nil {
					return err
				}
				return f.output.Print(cmd.OutOrStdout(), stats{resp, path, age}, func(out io.Writer) { printStats(out, stats{resp, path, age}) })
			})
		},
	}
	p.addAll(cmd)
	f.addVolume(cmd)
	return cmd
}

// stats is an answer of NodeGetVolumeStats, the path that was asked about, and the age
// of the values, if the plugin reports it.
type stats struct {
	resp      *csi.NodeGetVolumeStatsResponse
	path, age string
}

// MarshalJSON adds path and age to the JSON of the answer.
func (s stats) MarshalJSON() ([]byte, error) {
	raw, err := Message{s.resp}.MarshalJSON()
	if err != nil {
		return nil, err
	}
	fields := map[string]json.RawMessage{}
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, err
	}
	for name, text := range map[string]string{"volumePath": s.path, "ageSeconds": s.age} {
		if text == "" {
			continue
		}
		if fields[name], err = json.Marshal(text); err != nil {
			return nil, err
		}
	}
	return json.Marshal(fields)
}

func printStats(out io.Writer, s stats) {
	fmt.Fprintf(out, "At %s:\n", s.path)
	fmt.Fprintln(out, "UNIT\tTOTAL\tUSED\tAVAILABLE")
	for _, u := range s.resp.GetUsage() {
		total := u.GetUsed() == 0 && u.GetAvailable() == 0 // of a raw block device only the total is known
		amount := func(n int64) string {
			switch {
			case n == 0 && total:
				return "-"
			case u.GetUnit() == csi.VolumeUsage_BYTES:
				return Size(n)
			}
			return strconv.FormatInt(n, 10)
		}
		fmt.Fprintf(out, "%s\t%s\t%s\t%s\n", strings.ToLower(u.GetUnit().String()), amount(u.GetTotal()), amount(u.GetUsed()), amount(u.GetAvailable()))
	}
	if s.age != "" {
		fmt.Fprintf(out, "The values are %s seconds old.\n", s.age)
	}
}
