package main

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

func TestWeave(t *testing.T) {
	const sound = `package p

type s struct{ n int }

var table = []int{1, 2}

// add is documented.
func (x *s) add(a, b int, more ...int) (n int) { return a + b }

func unnamed(int) int { return 1 }

func silent(n int) { println(n) }
`
	w := &woven{text: sound}
	for i, tt := range []struct {
		old, new string
		asleep   bool
	}{
		{"a + b", "a - b", true},
		{"a + b", "b", true},
		{"println(n)", "println(-n)", true},
		{"1, 2", "2, 1", false},                     // no function
		{"return 1", "return 2", false},             // nothing to pass on
		{"a, b int, more", "b, a int, more", false}, // another signature
	} {
		asleep, err := w.weave(i, &mutant{name: "m"}, strings.Replace(sound, tt.old, tt.new, 1))
		if err != nil || asleep != tt.asleep {
			t.Errorf("%s: asleep %t, %v", tt.new, asleep, err)
		}
	}
	got := w.file()
	for _, want := range []string{
		`{ if mutantAwake == "0" { return x.add_0(a, b, more...) };  if mutantAwake == "1" { return x.add_1(a, b, more...) };  return a + b }`,
		"//line mutant m:1\nfunc (x *s) add_0(a, b int, more ...int) (n int) { return a - b }",
		"func silent_2(n int) { println(-n) }",
		`if mutantAwake == "2" { silent_2(n); return }`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("%q is not in\n%s", want, got)
		}
	}
	if _, err := parser.ParseFile(token.NewFileSet(), "", got, 0); err != nil {
		t.Error(err)
	}
}
