package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/client"
)

// Own is what works only with the program's own plugin.
type Own struct {
	Retry, Clear, Manifest *cobra.Command
	// StateDir is the default of --state-dir.
	StateDir string
	// Details returns what is known of the volumes beside their sizes, by their ids,
	// from the plugin of that driver on a state directory; nil: nothing is known.
	Details func(ctx context.Context, stateDir, driver string) map[string]Detail
}

// Detail is what `volume list` shows of a volume beside its size.
type Detail struct {
	Backend, Filesystem, Provisioning string
	State                             string // of what is asked of it on this node
	Pods                              []string
}

// Volume returns the command that calls a plugin by hand.
func Volume(own Own) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "volume",
		Short: "Call a CSI plugin by hand, and help volumes that are stuck",
		Long: `volume plays kubelet and the provisioner for one volume: it calls the plugin on
--endpoint, with the staging path that kubelet would choose. Most commands know
nothing of csi-node and work with every CSI plugin; retry, clear-device and
manifest are for csi-node alone.

Do not use these commands on volumes that kubelet manages: kubelet does not notice.

Exit codes: 0 done, 1 refused or failed, 2 wrong use.`,
		Example: `  # In a first terminal, a plugin on directories of your own:
  mkdir -p /tmp/try/kubelet
  export CSI_ENDPOINT=unix:///tmp/try/csi.sock CSI_NODE_STATE_DIR=/tmp/try/state CSI_NODE_KUBELET_DIR=/tmp/try/kubelet
  csi-node serve

  # In a second terminal, the same export, and then the examples of the commands
  # below in their order:
  csi-node volume capabilities --help`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCapabilitiesCommand(), newCreateCommand(), newListCommand(own), newStageCommand(), newPublishCommand(), newStatsCommand(),
		newExpandCommand(), own.Retry, newUnpublishCommand(), newUnstageCommand(), own.Manifest, own.Clear, newDeleteCommand())
	return cmd
}

// callFlags are the flags of all commands that call a plugin.
type callFlags struct {
	endpoint string
	timeout  Timeout
	output   Output
}

func (f *callFlags) add(cmd *cobra.Command) {
	f.addCall(cmd)
	f.output.Add(cmd)
}

// addVolume is add for a command whose argument is a volume.
func (f *callFlags) addVolume(cmd *cobra.Command) {
	cmd.Args, cmd.ValidArgsFunction = One("the id of the VOLUME"), CompleteVolume
	f.add(cmd)
}

// addCall is add without --output.
func (f *callFlags) addCall(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.endpoint, "endpoint", EndpointDefault(), "socket of the plugin; the environment's CSI_ENDPOINT is the default if set")
	f.timeout.Add(cmd, 2*time.Minute, "the plugin")
}

// call runs do with a client of the plugin.
func (f *callFlags) call(cmd *cobra.Command, do func(context.Context, *client.Client) error) error {
	if _, err := client.SocketPath(f.endpoint); err != nil {
		return usageError{err}
	}
	ctx, cancel := f.timeout.Context(cmd)
	defer cancel()
	c, err := client.Dial(ctx, f.endpoint)
	if err != nil {
		return err
	}
	err = do(ctx, c)
	return errors.Join(err, c.Close())
}

// callAt is call with the paths of a volume.
func (f *callFlags) callAt(cmd *cobra.Command, p *pathFlags, volume string, do func(context.Context, *client.Client, client.Paths) error) error {
	if err := p.check(); err != nil {
		return err
	}
	return f.call(cmd, func(ctx context.Context, c *client.Client) error {
		paths, err := p.paths(ctx, c, volume)
		if err != nil {
			return err
		}
		return do(ctx, c, paths)
	})
}

// pathFlags say where a volume is staged and published.
type pathFlags struct {
	kubeletDir, staging, target string
	shown                       string // at which it is asked about; empty: where it is likely to be seen
}

func (p *pathFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.kubeletDir, "kubelet-dir", KubeletDirDefault(), "directory of the default paths; the environment's CSI_NODE_KUBELET_DIR is the default if set")
}

func (p *pathFlags) addStaging(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.staging, "staging-path", "", "where the volume is staged (default: kubelet's path for it, below --kubelet-dir)")
}

func (p *pathFlags) addTarget(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.target, "target", "", "where the volume is published (default: by-hand/mount beside kubelet's staging path)")
}

// addAll adds the flags of a command that asks about a volume wherever it is.
func (p *pathFlags) addAll(cmd *cobra.Command) {
	cmd.Flags().StringVar(&p.shown, "path", "", "a path where the volume is staged or published (default: the target if there is one, else the staging path)")
	p.add(cmd)
	p.addStaging(cmd)
	p.addTarget(cmd)
}

func (p *pathFlags) check() error {
	return cmp.Or(absolute("kubelet-dir", p.kubeletDir), absolute("staging-path", p.staging), absolute("target", p.target), absolute("path", p.shown))
}

// paths returns the given paths, or the default ones. There is no staging path if the
// driver does not stage.
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

// outcome is what commands print if the answer to their call is empty.
type outcome struct {
	Volume  string `json:"volumeId"`
	Staging string `json:"stagingTargetPath,omitempty"`
	Target  string `json:"targetPath,omitempty"`
	Result  string `json:"result"`
}

// done prints an outcome, or a sentence that says the same.
func (f *callFlags) done(cmd *cobra.Command, what outcome, sentence string, args ...any) error {
	return f.output.Print(cmd.OutOrStdout(), what, func(out io.Writer) { fmt.Fprintf(out, sentence+"\n", args...) })
}

// CompletionTime bounds the calls that shell completion makes.
const CompletionTime = time.Second

// CompleteVolume completes the ids of the driver's volumes. If they cannot be listed it
// offers none: completion cannot report an error.
func CompleteVolume(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	endpoint := EndpointDefault()
	if f := cmd.Flag("endpoint"); f != nil {
		endpoint = f.Value.String()
	}
	ctx, cancel := context.WithTimeout(cmd.Context(), CompletionTime)
	defer cancel()
	var ids []string
	if c, err := client.Dial(ctx, endpoint); err == nil {
		all, _ := c.List(ctx)
		for _, entry := range all {
			ids = append(ids, entry.GetVolume().GetVolumeId())
		}
		_ = c.Close()
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}
