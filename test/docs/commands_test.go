package docs

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/csi-node/csi-node/pkg/kubectl"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

var (
	// ourCommand is a call of the program, at the start of a line or behind another command.
	ourCommand = regexp.MustCompile(`(?:^|-- |<\(|&& |; |\| |sudo )csi-node((?: [^;|&)]*)?)`)
	// ourFlag is a flag that is named by itself.
	ourFlag  = regexp.MustCompile(`^--[a-z]`)
	anyFlag  = regexp.MustCompile(`(?:^|\s)--([a-z][a-z-]*)`)
	helpFlag = regexp.MustCompile(`(?m)^ +(?:-\w, )?--([\w-]+)`)
	makeLine = regexp.MustCompile(`^make ([a-z][a-z0-9-]*)(?: [A-Z]+=\S+)*(?:\s+#.*)?$`)
	target   = regexp.MustCompile(`(?m)^([a-z][a-z0-9-]*):`)
)

// help is what `csi-node … --help` prints: the commands below it, and the flags.
type help struct {
	commands, flags []string
}

// helps asks the program for its help, each command once.
type helps struct {
	t   *testing.T
	all map[string]help
}

func (h *helps) of(command string) help {
	h.t.Helper()
	if known, ok := h.all[command]; ok {
		return known
	}
	result := harness.Run(h.t, nil, harness.Binary(h.t), append(strings.Fields(command), "--help")...)
	if result.Code != 0 {
		h.t.Fatalf("csi-node %s --help: %+v", command, result)
	}
	var found help
	listing := false
	for line := range strings.Lines(result.Stdout) {
		switch words := strings.Fields(line); {
		case !strings.HasPrefix(line, " "):
			title := strings.TrimSpace(line)
			listing = strings.HasSuffix(title, "Commands:") || slices.Contains([]string{"The plugin:", "By hand:", "More:"}, title)
		case listing && len(words) > 1:
			found.commands = append(found.commands, words[0])
		}
	}
	for _, m := range helpFlag.FindAllStringSubmatch(result.Stdout, -1) {
		found.flags = append(found.flags, m[1])
	}
	h.all[command] = found
	return found
}

// flags returns every flag that any command has.
func (h *helps) flags(command string) []string {
	of := h.of(command)
	all := slices.Clone(of.flags)
	for _, sub := range of.commands {
		if sub != "help" {
			all = append(all, h.flags(strings.TrimSpace(command+" "+sub))...)
		}
	}
	return all
}

// flagsOf adds the flags of a command and of those below it.
func flagsOf(cmd *cobra.Command, all *[]string) {
	add := func(f *pflag.Flag) { *all = append(*all, f.Name) }
	cmd.LocalFlags().VisitAll(add)
	for _, sub := range cmd.Commands() {
		flagsOf(sub, all)
	}
}

// TestCommandsExist: the commands of the program that the pages name, and their flags, are those that it has.
func TestCommandsExist(t *testing.T) {
	h := &helps{t, map[string]help{}}
	all := h.flags("")
	flagsOf(kubectl.Command(""), &all)
	deployed := read(t, "deploy/base/daemonset.yaml") // with the flags of sidecars
	seen := 0
	for _, p := range pages(t) {
		for _, line := range p.code() {
			for _, m := range ourCommand.FindAllStringSubmatch(line, -1) {
				seen++
				h.check(p.name, strings.Fields(m[1]))
			}
			if ourFlag.MatchString(line) {
				for _, m := range anyFlag.FindAllStringSubmatch(line, -1) {
					if !slices.Contains(all, m[1]) && !strings.Contains(deployed, "--"+m[1]) {
						t.Errorf("%s names the flag --%s, which no command has", p.name, m[1])
					}
				}
			}
		}
	}
	if seen < 60 {
		t.Errorf("found only %d commands", seen)
	}
}

// check finds the command that is named, and compares its flags.
func (h *helps) check(page string, words []string) {
	h.t.Helper()
	command := ""
	for len(words) > 0 && slices.Contains(h.of(command).commands, words[0]) {
		command, words = strings.TrimSpace(command+" "+words[0]), words[1:]
	}
	of := h.of(command)
	if len(words) > 0 && len(of.commands) > 0 && regexp.MustCompile(`^[a-z]`).MatchString(words[0]) {
		h.t.Errorf("%s names the command csi-node %s %s, which there is not", page, command, words[0])
	}
	for _, m := range anyFlag.FindAllStringSubmatch(strings.Join(words, " "), -1) {
		if !slices.Contains(of.flags, m[1]) {
			h.t.Errorf("%s names csi-node %s with the flag --%s, which it has not", page, command, m[1])
		}
	}
}

func TestMakeTargetsExist(t *testing.T) {
	var have []string
	for _, m := range target.FindAllStringSubmatch(read(t, "Makefile"), -1) {
		have = append(have, m[1])
	}
	seen := 0
	for _, p := range pages(t) {
		for _, line := range p.code() {
			for _, m := range makeLine.FindAllStringSubmatch(line, -1) {
				seen++
				if !slices.Contains(have, m[1]) {
					t.Errorf("%s names make %s, which there is not", p.name, m[1])
				}
			}
		}
	}
	if seen < 15 {
		t.Errorf("found only %d targets of make", seen)
	}
}

// TestTheFirstPageInstallsAsInstallDoes: the commands by which README.md installs are those of docs/install.md, which
// test/e2e runs.
func TestTheFirstPageInstallsAsInstallDoes(t *testing.T) {
	said := map[string]bool{}
	for _, line := range pageNamed(t, "docs/install.md").code() {
		said[strings.Join(strings.Fields(line), " ")] = true
	}
	seen := 0
	for _, line := range pageNamed(t, "README.md").code() {
		if strings.HasPrefix(line, "helm ") || strings.HasPrefix(line, "kubectl ") && !strings.HasPrefix(line, "kubectl csi-node") {
			seen++
			if command := strings.Join(strings.Fields(line), " "); !said[command] {
				t.Errorf("docs/install.md does not say %s", command)
			}
		}
	}
	if seen < 5 {
		t.Errorf("found only %d commands", seen)
	}
}

var (
	serveFlag = regexp.MustCompile(`(?m)^ +(?:-\w, )?--([\w-]+)(?: (?:string|int))? {2,}(.*)$`)
	flagItem  = regexp.MustCompile("^`--([\\w-]+)`(?: \\(`([\\w.]+)`\\))?: (.*)$")
)

// TestFlagsAreExplained: flags.md has each flag of serve in the words of its help, and names values that the chart has.
func TestFlagsAreExplained(t *testing.T) {
	result := harness.Run(t, nil, harness.Binary(t), "serve", "--help")
	want := map[string]string{}
	for _, m := range serveFlag.FindAllStringSubmatch(result.Stdout, -1) {
		if m[1] != "help" {
			want[m[1]] = m[2]
		}
	}
	var values map[string]any
	require.NoError(t, yaml.Unmarshal([]byte(read(t, "deploy/chart/values.yaml")), &values))
	have := map[string]string{}
	for _, part := range strings.Split(read(t, "docs/flags.md"), "\n- ")[1:] {
		part, _, _ = strings.Cut(part, "\n\n")
		m := flagItem.FindStringSubmatch(strings.Join(strings.Fields(part), " "))
		if m == nil {
			t.Errorf("flags.md has the item %q", part)
			continue
		}
		have[m[1]] = m[3]
		at, found := any(values), true
		for _, key := range strings.Split(m[2], ".") {
			within, _ := at.(map[string]any)
			if at, found = within[key]; !found && m[2] != "" {
				t.Errorf("flags.md names the value %s, which the chart has not", m[2])
				break
			}
		}
	}
	if len(want) < 20 || !maps.Equal(have, want) {
		t.Errorf("flags.md has\n%q\nand csi-node serve --help\n%q", have, want)
	}
}
