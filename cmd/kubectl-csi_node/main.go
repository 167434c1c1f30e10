// Command kubectl-csi_node is a plugin of kubectl, `kubectl csi-node`: it shows all
// nodes at once. Everything else is pkg/kubectl.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/kubectl"
)

// version is set by the linker: -X main.version=v1.2.3.
var version = ""

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := kubectl.Command(version).ExecuteContext(ctx)
	if err != nil {
		fmt.Fprintf(os.Stderr, "kubectl csi-node: %v\n", err)
	}
	os.Exit(command.ExitCode(err))
}
