package state

import (
	"strings"
	"unicode"
)

// plainRunes is how long a text of Plain is at most.
const plainRunes = 256

// Plain returns a text that a pod may have chosen, such as the name of a process or a path in
// its mount namespace, as an error may name it: on one line, valid, not long, and without
// what a terminal obeys. A question mark stands for each character that is left out.
func Plain(text string) string {
	text = strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(text, "?"))
	if all := []rune(text); len(all) > plainRunes {
		text = string(all[:plainRunes]) + "…"
	}
	return text
}
