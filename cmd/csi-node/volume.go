package main

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/client"
)

func newVolumeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Call a CSI plugin by hand, and get volumes out of trouble",
		Long: `volume plays kubelet and the provisioner for one volume: it calls the plugin on
--endpoint, with the staging path that kubelet would choose. Most commands know
nothing of csi-node and work with every CSI plugin; retry and clear-device are
for csi-node alone.

What kubelet manages is not for these commands: kubelet is not told.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.`,
		Example: `  # In a first terminal, a plugin on directories of your own:
  mkdir -p /tmp/try/kubelet
  export CSI_ENDPOINT=unix:///tmp/try/csi.sock CSI_NODE_STATE_DIR=/tmp/try/state CSI_NODE_KUBELET_DIR=/tmp/try/kubelet
  csi-node serve --pool-dir /tmp/try/pool

  # In a second terminal, the same export, and then the examples of the commands
  # below in their order:
  csi-node volume capabilities --help`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCapabilitiesCommand(), newCreateCommand(), newListCommand(), newStageCommand(), newPublishCommand(), newStatsCommand(),
		newExpandCommand(), newRetryCommand(), newUnpublishCommand(), newUnstageCommand(), newClearDeviceCommand(), newDeleteCommand())
	return cmd
}

// callFlags are the flags of all commands that call a plugin.
type callFlags struct {
	endpoint string
	timeout  timeoutFlag
	output   outputFlag
}

func (f *callFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.endpoint, "endpoint", endpointDefault(), "socket of the plugin; the environment's CSI_ENDPOINT is the default if set")
	f.timeout.add(cmd, 2*time.Minute, "the plugin")
	f.output.add(cmd)
}

// call runs do with a client of the plugin.
func (f *callFlags) call(cmd *cobra.Command, do func(context.Context, *client.Client) error) error {
	if err := cmp.Or(f.timeout.check(), f.output.check()); err != nil {
		return err
	}
	if _, err := client.SocketPath(f.endpoint); err != nil {
		return usageError{err}
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), time.Duration(f.timeout))
	defer cancel()
	c, err := client.Dial(ctx, f.endpoint)
	if err != nil {
		return err
	}
	err = do(ctx, c)
	return errors.Join(err, c.Close())
}

// pathFlags say where a volume is staged and published.
type pathFlags struct {
	kubeletDir, staging, target string
}

func (p *pathFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.kubeletDir, "kubelet-dir", kubeletDirDefault(), "directory of the default paths; the environment's CSI_NODE_KUBELET_DIR is the default if set")
}

func (p *pathFlags) addStaging(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.staging, "staging-path", "", "where the volume is staged (default: kubelet's path for it, below --kubelet-dir)")
}

func (p *pathFlags) addTarget(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.target, "target", "", "where the volume is published (default: by-hand/mount beside kubelet's staging path)")
}

func (p *pathFlags) check() error {
	return cmp.Or(absolute("kubelet-dir", p.kubeletDir), absolute("staging-path", p.staging), absolute("target", p.target))
}

// paths returns the paths that are given or the default ones; no staging path
// when the driver does not stage.
func (p *pathFlags) paths(ctx context.Context, c *client.Client, volume string) (client.Paths, error) {
	driver, err := c.DriverName(ctx)
	if err != nil {
		return client.Paths{}, err
	}
	stages, err := c.Stages(ctx)
	if err != nil {
		return client.Paths{}, err
	}
	paths := client.DefaultPaths(p.kubeletDir, driver, volume)
	if p.staging != "" {
		paths.Staging = p.staging
	}
	if p.target != "" {
		paths.Target = p.target
	}
	if !stages {
		paths.Staging = ""
	}
	return paths, nil
}

// outcome is what the commands print that are answered with nothing but OK.
type outcome struct {
	Volume  string `json:"volumeId"`
	Staging string `json:"stagingTargetPath,omitempty"`
	Target  string `json:"targetPath,omitempty"`
	Result  string `json:"result"`
}
