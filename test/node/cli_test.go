package node

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// environment is that of a person who has set it up for the plugin, with the
// built csi-node in the PATH.
func environment(t *testing.T, p *harness.Plugin) []string {
	t.Helper()
	return []string{
		"PATH=" + filepath.Dir(harness.Binary(t)) + ":" + os.Getenv("PATH"),
		"CSI_ENDPOINT=unix://" + p.Socket, "CSI_NODE_STATE_DIR=" + p.StateDir, "CSI_NODE_KUBELET_DIR=" + p.KubeletDir,
	}
}

// shell runs a command line as it is typed.
func shell(t *testing.T, p *harness.Plugin, line string) harness.Result {
	t.Helper()
	return harness.Run(t, environment(t, p), "sh", "-c", line)
}

// typed runs a command line that must succeed, and reads its JSON.
func typed(t *testing.T, p *harness.Plugin, line string, into any) {
	t.Helper()
	result := shell(t, p, line+" --output json")
	if result.Code != 0 || result.Stderr != "" {
		t.Fatalf("%s: exit code %d: %s", line, result.Code, result.Stderr)
	}
	if err := json.Unmarshal([]byte(result.Stdout), into); err != nil {
		t.Fatalf("%s: %v in %s", line, err, result.Stdout)
	}
}

// refused runs a command line that must fail with the exit code and all words.
func refused(t *testing.T, p *harness.Plugin, code int, line string, words ...string) {
	t.Helper()
	result := shell(t, p, line)
	if result.Code != code {
		t.Fatalf("%s: exit code %d, want %d: %s%s", line, result.Code, code, result.Stdout, result.Stderr)
	}
	for _, word := range words {
		if !strings.Contains(result.Stderr, word) {
			t.Errorf("%s does not say %q: %s", line, word, result.Stderr)
		}
	}
}

// examples returns the example lines of a command's help.
func examples(t *testing.T, p *harness.Plugin, command string) []string {
	t.Helper()
	result := shell(t, p, command+" --help")
	_, text, found := strings.Cut(result.Stdout, "\nExamples:\n")
	if result.Code != 0 || !found {
		t.Fatalf("%s --help: %+v", command, result)
	}
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, " ") && line != "\n" {
			break // the next heading
		}
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}

// What the help of the volume commands shows works as it is, in the order in
// which `csi-node volume --help` lists the commands.
func TestHelpExamplesWork(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	result := shell(t, p, "csi-node volume --help")
	_, list, found := strings.Cut(result.Stdout, "\nAvailable Commands:\n")
	if !found {
		t.Fatalf("no commands in %s", result.Stdout)
	}
	list, _, _ = strings.Cut(list, "\n\n")
	offered := shell(t, p, "csi-node volume capabilities").Stdout
	lines := 0
	for line := range strings.Lines(list) {
		name := strings.Fields(line)[0]
		for _, example := range examples(t, p, "csi-node volume "+name) {
			want := 0
			switch {
			case name == "clear-device" && !strings.Contains(example, "--i-understand"), name == "list" && !strings.Contains(offered, "LIST_VOLUMES"):
				want = 1
			}
			if result := shell(t, p, example); result.Code != want {
				t.Errorf("%s: exit code %d: %s%s", example, result.Code, result.Stdout, result.Stderr)
			}
			lines++
		}
	}
	if lines < 15 {
		t.Errorf("only %d examples in %s", lines, list)
	}
	for _, command := range []string{"csi-node status", "csi-node version", "csi-node help", "csi-node completion", "csi-node completion bash"} {
		for _, example := range examples(t, p, command) {
			if result := harness.Run(t, environment(t, p), "bash", "-c", example); result.Code != 0 {
				t.Errorf("%s: exit code %d: %s", example, result.Code, result.Stderr)
			}
		}
	}
	mustHaveNoRecord(t, p)
}
