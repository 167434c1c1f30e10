package command

import (
	"bytes"
	"strings"
	"testing"
)

// What kubectl would take for a boolean is quoted: it reads YAML 1.1.
func TestYAMLForKubectl(t *testing.T) {
	var text bytes.Buffer
	if err := writeYAML(&text, map[string]any{"a": "no", "b": "Yes", "c": "y", "d": "north", "e": true, "f": "true"}); err != nil {
		t.Fatal(err)
	}
	if want := "a: \"no\"\nb: \"Yes\"\nc: \"y\"\nd: north\ne: true\nf: \"true\"\n"; text.String() != want {
		t.Errorf("written is\n%s", strings.TrimSpace(text.String()))
	}
}
