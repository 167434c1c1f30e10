package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// shell runs a command line as a person types it who has set the environment up
// for the plugin, with the built csi-node in the PATH.
func shell(t *testing.T, p *harness.Plugin, line string) harness.Result {
	t.Helper()
	binary := harness.Binary(t)
	env := []string{
		"PATH=" + filepath.Dir(binary) + ":" + os.Getenv("PATH"),
		"CSI_ENDPOINT=unix://" + p.Socket, "CSI_NODE_STATE_DIR=" + p.StateDir, "CSI_NODE_KUBELET_DIR=" + p.KubeletDir,
	}
	return harness.Run(t, env, "sh", "-c", line)
}
