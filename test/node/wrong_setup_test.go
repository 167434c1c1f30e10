package node

import (
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// A wrong setup ends the plugin before it serves, with one line that says what is wrong
// and what to do. What may be wrong the tests of each package have, see
// TestRunWithAWrongSetup and TestListenRefuses in pkg/driver.
func TestWrongSetupEndsThePlugin(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		args func(*harness.Plugin) []string
		env  []string
		told []string
	}{
		"a flag that there is not":       {func(p *harness.Plugin) []string { return append(p.Flags(), "--nonsense") }, nil, []string{"--nonsense", "--help"}},
		"an endpoint in the environment": {func(p *harness.Plugin) []string { return p.Flags()[2:] }, []string{"CSI_ENDPOINT=tcp://nonsense"}, []string{"tcp://nonsense", "unix:///"}},
		"a pool among other files": {func(p *harness.Plugin) []string {
			makeDir(t, p.PoolDir)
			write(t, filepath.Join(p.PoolDir, "precious"), "data")
			return p.Flags()
		}, nil, []string{"--pool-dir", "pool"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := harness.New(t)
			result := harness.Run(t, row.env, harness.Binary(t), append([]string{"serve"}, row.args(p)...)...)
			if result.Code == 0 {
				t.Error("exit code 0")
			}
			var lines []string
			for _, line := range strings.Split(strings.TrimRight(result.Stderr, "\n"), "\n") {
				if !logLine.MatchString(line) {
					lines = append(lines, line)
				}
			}
			if len(lines) != 1 || !strings.HasPrefix(lines[0], "csi-node: ") {
				t.Fatalf("on stderr, want one line that starts with csi-node:\n%s", result.Stderr)
			}
			for _, word := range row.told {
				if !strings.Contains(lines[0], word) {
					t.Errorf("it does not say %q: %s", word, lines[0])
				}
			}
			if mounts, loops := p.Mounts(), p.Loops(); len(mounts)+len(loops) > 0 {
				t.Errorf("left: %q, %+v", mounts, loops)
			}
		})
	}
}

// Who reads the log as JSON gets what ended the plugin as JSON, and once.
func TestWrongSetupInAJSONLog(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	makeDir(t, p.PoolDir)
	write(t, filepath.Join(p.PoolDir, "precious"), "data")
	result := harness.Run(t, nil, harness.Binary(t), append([]string{"serve", "--logging-format", "json"}, p.Flags()...)...)
	var last struct{ Msg, Err string }
	for line := range strings.Lines(result.Stderr) {
		if err := json.Unmarshal([]byte(line), &last); err != nil {
			t.Fatalf("%v:\n%s", err, result.Stderr)
		}
	}
	if result.Code != 1 || last.Msg != "Ended" || !strings.Contains(last.Err, "--pool-dir") || strings.Count(result.Stderr, "is no pool") != 1 {
		t.Errorf("exit code %d, and on stderr:\n%s", result.Code, result.Stderr)
	}
}

// logLine is how klog begins a line.
var logLine = regexp.MustCompile(`^[IWEF]\d{4} `)
