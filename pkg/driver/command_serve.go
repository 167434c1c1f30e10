package driver

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/tracing"
)

func newServeCommand(o Options) *cobra.Command {
	var cfg Config
	var logging loggingFlags
	heal := true
	backendFlags := backendFlags(o.Backends)
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Serve the CSI socket (the default)",
		Long: `serve answers CSI calls until SIGTERM, and then leaves every mount in place; the
next start takes over what is there. A second process on the same state
directory waits for the first to end, so that upgrades may overlap.

Needed: root, /dev/loop-control, and the tools for ext4 (Debian: e2fsprogs), xfs (Debian:
xfsprogs) and btrfs (Debian: btrfs-progs). Whatever is missing is reported at the start.`,
		Example: `  csi-node serve --endpoint unix:///tmp/csi.sock --state-dir /tmp/csi-state --kubelet-dir /tmp --v 4`,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg.log = &logTail{}
			end, err := logging.begin(cfg.log)
			if err != nil {
				return err
			}
			defer end()
			if cfg.NodeID == "" {
				name, err := os.Hostname()
				if err != nil {
					return fmt.Errorf("--node-id is not set and the hostname is not known: %w", err)
				}
				cfg.NodeID = name
			}
			cfg.DetectOnly = !heal
			cfg.BackendFlags = map[string]string{}
			backendFlags.VisitAll(func(flag *pflag.Flag) {
				if flag.Changed {
					cfg.BackendFlags[flag.Name] = flag.Value.String()
				}
			})
			return logging.ended(Run(cmd.Context(), cfg, o), o)
		},
	}
	cmd.Flags().AddFlagSet(engineFlags(o, &cfg, &heal, &logging))
	command.Complete(cmd, "logging-format", textFormat, jsonFormat)
	cmd.Flags().AddFlagSet(backendFlags)
	return cmd
}

// engineFlags returns the flags that serve has in every driver.
func engineFlags(o Options, cfg *Config, heal *bool, logging *loggingFlags) *pflag.FlagSet {
	f := pflag.NewFlagSet("serve", pflag.ContinueOnError)
	f.StringVar(&cfg.Endpoint, "endpoint", command.EndpointDefault(), "CSI socket; the environment's CSI_ENDPOINT is the default if set")
	f.StringVar(&cfg.NodeID, "node-id", "", "name of this node (default: the hostname)")
	f.StringVar(&cfg.DriverName, "driver-name", o.Name, "name of the CSI driver")
	f.StringVar(&cfg.StateDir, "state-dir", o.stateDir(), "directory of the intents; on a tmpfs, so that a reboot forgets them with the mounts")
	f.StringVar(&cfg.LibDir, "lib-dir", o.libDir(), "directory of what must survive a reboot and cannot be stored with the data")
	f.StringVar(&cfg.KubeletDir, "kubelet-dir", command.KubeletDirDefault(), "paths in requests must lie under it, by whatever symbolic links lead to it; / allows all")
	f.StringVar(&cfg.HTTPEndpoint, "http-endpoint", "", "address for /metrics, /healthz and /readyz, such as 127.0.0.1:9810; keeps few connections, each for one request (default: none)")
	f.StringVar(&cfg.RegistrationDir, "registration-dir", "", "kubelet's plugins_registry: register there, without node-driver-registrar; --endpoint must be the socket's path on the node (default: somebody else registers)")
	f.Int64Var(&cfg.MaxVolumes, "max-volumes-per-node", 0, "limit reported to the scheduler; 0: that of the storage")
	f.BoolVar(heal, "heal", true, "restore mounts that are lost behind the plugin's back; false: only report them")
	f.StringVar(&cfg.TracingEndpoint, "tracing-endpoint", "", "collector of traces, by OTLP over gRPC without TLS: host:port, or unix:///path (default: none)")
	f.IntVar(&cfg.TracingPerMillion, "tracing-sampling-rate-per-million", tracing.AllTraces, "how many of a million traces are kept that begin here; those of callers are kept if the caller keeps them")
	f.IntVarP(&logging.verbosity, "v", "v", 2, "log level: 2 logs each step, 4 each call")
	f.StringVar(&logging.format, "logging-format", textFormat, "of the log: text, or json, an object a line with the keys of Kubernetes")
	return f
}
