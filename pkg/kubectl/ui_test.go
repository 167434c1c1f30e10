package kubectl

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/ui"
	"github.com/csi-node/csi-node/test/require"
)

// pageOf returns what the page of a command line shows.
func pageOf(t *testing.T, flags ...string) ui.Source {
	t.Helper()
	c := &cluster{program: "kubectl"}
	cmd := &cobra.Command{Run: func(cmd *cobra.Command, _ []string) { c.connect(cmd) }}
	c.addFlags(cmd)
	cmd.SetArgs(flags)
	cmd.SetOut(io.Discard)
	require.NoError(t, cmd.Execute())
	return c.page()
}

func TestPage(t *testing.T) {
	dir := fake(t)
	page := pageOf(t, "--context", "c1")
	shown, err := page.Read(t.Context())
	require.NoError(t, err)
	if len(shown.Nodes) != 2 || len(shown.Notes) != 0 || shown.Nodes[0].Volumes[0].Claim != "default/data" || shown.Nodes[1].Volumes[0].Claim != "" {
		t.Errorf("the page shows %+v", shown)
	}
	told, err := page.Explain(t.Context(), shown.Nodes[0], "--vol-1")
	if err != nil || told.Volume != "--context=c1 exec --namespace=csi-node plugin-a --container=csi-node -- csi-node explain --output=json -- --vol-1" {
		t.Errorf("explained is %+v (%v)", told, err)
	}
	// A volume without a claim does not have all PersistentVolumes listed again and again.
	_, err = page.Read(t.Context())
	require.NoError(t, err)
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	require.NoError(t, err)
	if n := strings.Count(string(calls), "get persistentvolumes "); n != 1 {
		t.Errorf("they were listed %d times", n)
	}
	for call := range strings.Lines(string(calls)) {
		if !strings.HasPrefix(call, "--context=c1 ") {
			t.Errorf("called was kubectl %s", call)
		}
	}

	require.NoError(t, os.WriteFile(filepath.Join(dir, "silent"), nil, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "forbidden"), nil, 0o600))
	page = pageOf(t)
	shown, err = page.Read(t.Context())
	if err != nil || !strings.Contains(shown.Nodes[1].Error, "error dialing backend") || len(shown.Notes) != 1 || !strings.Contains(shown.Notes[0], "Claims are not named: kubectl get: Error from server (Forbidden)") || shown.Nodes[0].Volumes[0].Volume != "vol-1" {
		t.Errorf("the page shows %+v (%v)", shown, err)
	}
	if _, err := page.Explain(t.Context(), report.NodeOf{Name: "b", Pod: "csi-node/plugin-b"}, "vol-2"); err == nil {
		t.Error("a node that does not answer explains")
	}
	if _, err := pageOf(t, "--node", "z").Read(t.Context()); err == nil || !strings.Contains(err.Error(), "no pod of csi-node runs on node z") {
		t.Errorf("of a node without csi-node: %v", err)
	}
	for _, port := range []string{"-1", "65536"} {
		if _, _, err := run(t, "ui", "--port", port); command.ExitCode(err) != 2 || !strings.Contains(err.Error(), "--port") {
			t.Errorf("at a port that is none: %v", err)
		}
	}
	if _, _, err := run(t, "ui", "all"); command.ExitCode(err) != 2 {
		t.Errorf("with an argument: %v", err)
	}
}
