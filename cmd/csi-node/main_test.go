package main

import (
	"bytes"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/test/require"
)

// Manifests and scripts of users depend on these names and defaults.
var serveFlags = map[string]string{
	"endpoint":                          "unix:///csi/csi.sock",
	"node-id":                           "", // the hostname
	"driver-name":                       "csi-node.local",
	"state-dir":                         "/run/csi-node",
	"kubelet-dir":                       "/var/lib/kubelet",
	"logging-format":                    "text",
	"tracing-endpoint":                  "",
	"tracing-sampling-rate-per-million": "1000000",
	"lib-dir":                           "/var/lib/csi-node",
	"pool-dir":                          "/var/lib/csi-node/pool",
	"pool-reserve":                      "1Gi,5%",
	"pool-require-mount":                "false",
	"inline-max-size":                   "0",
	"inline-max-total":                  "0",
	"lvm-groups":                        "",
	"http-endpoint":                     "",
	"registration-dir":                  "",
	"max-volumes-per-node":              "0",
	"heal":                              "true",
	"v":                                 "2",
}

func find(t *testing.T, name string) *cobra.Command {
	t.Helper()
	root := newCommand()
	cmd, _, err := root.Find(strings.Fields(name))
	if err != nil || name != "" && cmd == root {
		t.Fatalf("no command %q (%v)", name, err)
	}
	return cmd
}

var flagName = regexp.MustCompile(`(?m)^ +(?:-\w, )?--([\w-]+)`)

// defaults returns the flags of a command and their defaults.
func defaults(cmd *cobra.Command) map[string]string {
	all := map[string]string{}
	for _, m := range flagName.FindAllStringSubmatch(cmd.Flags().FlagUsages(), -1) {
		all[m[1]] = cmd.Flags().Lookup(m[1]).DefValue
	}
	return all
}

// Flags of several commands.
var (
	callDefaults   = map[string]string{"endpoint": "unix:///csi/csi.sock", "timeout": "2m0s", "output": "table"}
	pluginDefaults = map[string]string{"state-dir": "/run/csi-node", "timeout": "2m0s", "output": "table"}
	accessDefaults = map[string]string{"access-mode": "ReadWriteOnce", "block": "false", "fs-type": "", "mount-flag": "[]"}
	secretDefaults = map[string]string{"secret": "[]"}
	pathDefaults   = map[string]string{"kubelet-dir": "/var/lib/kubelet", "staging-path": "", "target": ""}
)

func union(all ...map[string]string) map[string]string {
	sum := map[string]string{}
	for _, m := range all {
		maps.Copy(sum, m)
	}
	return sum
}

func without(m map[string]string, key string) map[string]string {
	m = maps.Clone(m)
	delete(m, key)
	return m
}

func TestFlags(t *testing.T) {
	for _, name := range []string{"CSI_ENDPOINT", "CSI_NODE_STATE_DIR", "CSI_NODE_KUBELET_DIR"} {
		t.Setenv(name, "")
	}
	for name, want := range map[string]map[string]string{
		"":                    serveFlags,
		"serve":               serveFlags,
		"status":              {"output": "table", "state-dir": "/run/csi-node", "volume": "[]", "pod": "", "failing": "false", "watch": "false"},
		"explain":             union(pluginDefaults, map[string]string{"timeout": "10s"}),
		"orphans":             union(pluginDefaults, map[string]string{"clean": "false", "timeout": "30s"}),
		"report":              {"state-dir": "/run/csi-node", "timeout": "1m0s", "file": "", "stdout": "false", "log": ""},
		"probe":               {"state-dir": "/run/csi-node", "timeout": "5s"},
		"demo":                {},
		"csidriver":           {"driver-name": "csi-node.local"},
		"version":             {},
		"volume":              {},
		"volume capabilities": callDefaults,
		"volume create":       union(callDefaults, accessDefaults, secretDefaults, map[string]string{"size": "", "parameter": "[]"}),
		"volume list":         union(callDefaults, map[string]string{"state-dir": "/run/csi-node"}),
		"volume manifest":     {"state-dir": "/run/csi-node", "timeout": "30s", "output": "yaml", "secret-ref": "", "storage-class": ""},
		"volume stage":        union(callDefaults, accessDefaults, secretDefaults, without(pathDefaults, "target"), map[string]string{"context": "[]", "publish-context": "[]"}),
		"volume publish":      union(callDefaults, accessDefaults, secretDefaults, pathDefaults, map[string]string{"context": "[]", "publish-context": "[]", "read-only": "false"}),
		"volume stats":        union(callDefaults, pathDefaults, map[string]string{"path": ""}),
		"volume expand":       union(callDefaults, accessDefaults, secretDefaults, pathDefaults, map[string]string{"path": "", "size": ""}),
		"volume retry":        pluginDefaults,
		"volume unpublish":    union(callDefaults, without(pathDefaults, "staging-path")),
		"volume unstage":      union(callDefaults, without(pathDefaults, "target")),
		"volume clear-device": union(pluginDefaults, map[string]string{understood: "false"}),
		"volume delete":       union(callDefaults, secretDefaults),
	} {
		if got := defaults(find(t, name)); !maps.Equal(got, want) {
			t.Errorf("csi-node %s has the flags %v, not %v", name, got, want)
		}
	}
	if v := find(t, "serve").Flags().ShorthandLookup("v"); v == nil || v.Name != "v" {
		t.Errorf("-v is %v, and --v in all programs of Kubernetes", v)
	}
}

func TestCSIEndpoint(t *testing.T) {
	t.Setenv("CSI_ENDPOINT", "unix:///env.sock")
	for title, test := range map[string]struct {
		args []string
		want string
	}{
		"environment":        {nil, `"unix:///env.sock"`},
		"serve, environment": {[]string{"serve"}, `"unix:///env.sock"`},
		"flag":               {[]string{"--endpoint", "unix:///flag.sock"}, `"unix:///flag.sock"`},
		"serve, flag":        {[]string{"serve", "--endpoint=unix:///flag.sock"}, `"unix:///flag.sock"`},
	} {
		t.Run(title, func(t *testing.T) {
			root := newCommand()
			cmd, rest, err := root.Find(test.args)
			if err == nil {
				err = cmd.ParseFlags(rest)
			}
			require.NoError(t, err)
			if got := cmd.Flags().Lookup("endpoint").Value.String(); `"`+got+`"` != test.want {
				t.Errorf("the endpoint is %q, not %s", got, test.want)
			}
		})
	}
}

func newCommand() *cobra.Command { return driver.Command(options()) }

const understood = "i-understand-this-destroys-data"

// run returns what a command prints and its error.
func run(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	cmd := newCommand()
	cmd.SetArgs(args)
	cmd.SetOut(&out)
	cmd.SetErr(&out)
	err := cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestWrongUse(t *testing.T) {
	for _, test := range []struct {
		args  []string
		words []string
	}{
		{[]string{"--nonsense"}, []string{"--nonsense", "csi-node --help"}},
		{[]string{"serve", "--nonsense"}, []string{"--nonsense", "csi-node serve --help"}},
		{[]string{"status", "--v", "4"}, []string{"--v", "csi-node status --help"}},
		{[]string{"--max-volumes-per-node", "many"}, []string{"--max-volumes-per-node", "many"}},
		{[]string{"nonsense"}, []string{"nonsense"}},
		{[]string{"stauts"}, []string{`unknown command "stauts" for "csi-node" (did you mean `, "`csi-node status`?); `csi-node --help` shows how"}},
		{[]string{"serve", "--heal", "false"}, []string{"--FLAG=false"}},
		{[]string{"serve", "--v", "-3"}, []string{"--v -3: must not be negative"}},
		{[]string{"volume", "publsih", "vol"}, []string{"did you mean `csi-node volume publish`?"}},
		{[]string{"help", "nonsense"}, []string{`unknown command "nonsense" for "csi-node"; `}},
		{[]string{"help", "volume", "stge"}, []string{`"stge" for "csi-node volume" (did you mean `, "`csi-node volume stage`?"}},
		{[]string{"help", "status", "nonsense"}, []string{"nonsense", "csi-node status --help"}},
		{[]string{"completion", "nonsense"}, []string{"nonsense", "csi-node completion --help"}},
		{[]string{"x"}, []string{`"x" for "csi-node"; `}},
		{[]string{"serve", "nonsense"}, []string{"nonsense"}},
		{[]string{"version", "nonsense"}, []string{"nonsense"}},
		{[]string{"status", "--output", "xml"}, []string{"--output", "xml", "table, json, yaml or wide"}},
		// The hostname stands in for the name of the node: the next error is about another flag.
		{[]string{"--state-dir", "relative"}, []string{"--state-dir"}},
		{[]string{"--kubelet-dir", "relative"}, []string{"--kubelet-dir"}},
		{[]string{"--endpoint", "tcp://x"}, []string{"--endpoint"}},
		{[]string{"--max-volumes-per-node", "-1"}, []string{"--max-volumes-per-node", "0 means the limit of the storage"}},
		{[]string{"--tracing-endpoint", "foo"}, []string{"--tracing-endpoint"}},
		{[]string{"csidriver", "--driver-name", "BAD"}, []string{"--driver-name"}},
		{[]string{"volume", "list", "--endpoint", "foo"}, []string{`endpoint "foo"`}},
		{[]string{"volume", "manifest", "--secret-ref", "x"}, []string{"--secret-ref"}},
	} {
		out, err := run(t, test.args...)
		if err == nil || out != "" || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q prints %q; %v, not one line of error", test.args, out, err)
			continue
		}
		if code := command.ExitCode(err); code != 2 {
			t.Errorf("%q: the exit code is %d for %v", test.args, code, err)
		}
		for _, words := range test.words {
			if !strings.Contains(err.Error(), words) {
				t.Errorf("%q: no %q in: %v", test.args, words, err)
			}
		}
	}
}

func TestVersion(t *testing.T) {
	linked := version
	t.Cleanup(func() { version = linked })
	for _, version = range []string{"", "v1.2.3"} {
		for _, asked := range []string{"version", "--version"} { // as the sidecars of Kubernetes are asked
			if out, err := run(t, asked); err != nil || version != "" && out != version+"\n" || !strings.HasPrefix(out, "v") || len(out) < 3 {
				t.Errorf("%s of the version %q prints %q (%v)", asked, version, out, err)
			}
		}
	}
}

// Nothing in a release can make a step fail.
func TestFaultsAreNotInReleases(t *testing.T) {
	list := func(tags, what string) []string {
		cmd := exec.CommandContext(t.Context(), "go", "list", "-tags", tags, "-f", what, ".")
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		require.NoError(t, err)
		return strings.Fields(string(out))
	}
	for tags, want := range map[string]bool{"": false, "faults": true} {
		deps := list(tags, `{{join .Deps "\n"}}`)
		if slices.Contains(deps, "github.com/csi-node/csi-node/pkg/driver/faults") != want || slices.Contains(deps, "testing") {
			t.Errorf("with the tags %q a program is made of %q", tags, deps)
		}
	}
	const files = `{{join .GoFiles "\n"}}`
	release, faulty := list("", files), list("faults", files)
	if !slices.Contains(release, "hook_release.go") || slices.Contains(release, "hook.go") {
		t.Errorf("a release is made of %v", release)
	}
	if slices.Contains(faulty, "hook_release.go") || !slices.Contains(faulty, "hook.go") {
		t.Errorf("a build with faults is made of %v", faulty)
	}
	for _, name := range release {
		if text, err := os.ReadFile(name); err != nil || bytes.Contains(text, []byte("CSI_NODE_FAULT")) {
			t.Errorf("%s of a release reads CSI_NODE_FAULT (%v)", name, err)
		}
	}
}
