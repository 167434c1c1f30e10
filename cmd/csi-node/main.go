// Command csi-node is a CSI node plugin for local storage: files in a pool directory
// (backend pool), block devices (backend disk) and logical volumes (backend lvm).
// Everything else is pkg/driver.
package main

import (
	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/disk"
	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/pkg/devices/lvm"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/driver"
)

// version is set by the linker: -X main.version=v1.2.3.
var version = ""

func main() { driver.Main(options()) }

// backends are the kinds of storage that this binary has.
func backends() []devices.Kind { return []devices.Kind{pool.Kind(), disk.Kind(), lvm.Kind()} }

func options() driver.Options {
	return driver.Options{
		Name:    "csi-node.local",
		Program: "csi-node",
		Version: version,
		Short:   "A CSI node plugin built around a reconciler",
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
		Backends: backends(),
		Layers:   []devices.Layer{luks.New()},
		Commands: commands,
		Hook:     hook(),
	}
}

// commands adds the demo, and --pool-dir to the examples that start a plugin.
func commands(root *cobra.Command) {
	demo := newDemoCommand()
	demo.GroupID = "hand"
	root.AddCommand(demo)
	for _, c := range root.Commands() {
		switch c.Name() {
		case "serve":
			c.Example = "  csi-node serve --endpoint unix:///tmp/csi.sock --state-dir /tmp/csi-state --pool-dir /tmp/csi-pool --kubelet-dir /tmp --v 4"
		case "volume":
			c.Example = volumeExample
		}
	}
}

const volumeExample = `  # In a first terminal, a plugin on directories of your own:
  mkdir -p /tmp/try/kubelet
  export CSI_ENDPOINT=unix:///tmp/try/csi.sock CSI_NODE_STATE_DIR=/tmp/try/state CSI_NODE_KUBELET_DIR=/tmp/try/kubelet
  csi-node serve --pool-dir /tmp/try/pool

  # In a second terminal, the same export, and then the examples of the commands
  # below in their order:
  csi-node volume capabilities --help`
