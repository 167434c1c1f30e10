package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

func walk(cmd *cobra.Command, visit func(*cobra.Command)) {
	visit(cmd)
	for _, sub := range cmd.Commands() {
		walk(sub, visit)
	}
}

// Each command says what it does, and has an example. test/node runs the examples.
func TestEveryCommandHasAnExample(t *testing.T) {
	seen := 0
	walk(newCommand(), func(cmd *cobra.Command) {
		seen++
		if cmd.Short == "" || cmd.Long == "" && cmd.Name() != "version" {
			t.Errorf("%s does not say what it does", cmd.CommandPath())
		}
		if !strings.Contains(cmd.Example, "csi-node") {
			t.Errorf("%s has no example", cmd.CommandPath())
		}
		for line := range strings.Lines(cmd.Example) {
			if strings.TrimSpace(line) != "" && !strings.HasPrefix(line, "  ") {
				t.Errorf("%s: the example %q is not indented", cmd.CommandPath(), line)
			}
		}
		out, err := run(t, append(strings.Fields(cmd.CommandPath())[1:], "--help")...)
		if err != nil || !strings.Contains(out, "Examples:") {
			t.Errorf("%s --help prints %q (%v)", cmd.CommandPath(), out, err)
		}
	})
	if seen < 27 {
		t.Errorf("%d commands", seen)
	}
}
