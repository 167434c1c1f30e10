package state

import (
	"strings"
	"testing"
)

func TestPlain(t *testing.T) {
	for text, want := range map[string]string{
		"my tool (2) ~ é":                   "my tool (2) ~ é",
		"a\nE1128 forged\r\t":               "a?E1128 forged??",
		"\x1b[31mred\x1b]0;title\a":         "?[31mred?]0;title?",
		"\xff\xfe\x80":                      "?",
		"left\u202eright\u0085":             "left?right?",
		strings.Repeat("é", plainRunes):     strings.Repeat("é", plainRunes),
		strings.Repeat("é", plainRunes+100): strings.Repeat("é", plainRunes) + "…",
	} {
		if got := Plain(text); got != want {
			t.Errorf("%q became %q, want %q", text, got, want)
		}
	}
}
