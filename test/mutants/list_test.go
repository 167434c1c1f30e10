package main

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestListsAreUpToDate makes no mutant, but shows that each could be made.
func TestListsAreUpToDate(t *testing.T) {
	mutants, err := readLists()
	if err != nil {
		t.Fatal(err)
	}
	if len(mutants) == 0 {
		t.Fatal("no mutants")
	}
	const root = "../.."
	known := map[string][]string{}
	tests := func(pkg string) []string {
		if known[pkg] == nil {
			if known[pkg], err = testsOf(filepath.Join(root, pkg)); err != nil {
				t.Fatal(err)
			}
		}
		return known[pkg]
	}
	for _, m := range mutants {
		if err := m.check(root, tests); err != nil {
			t.Errorf("mutant %q: %v", m.name, err)
		}
	}
}

const example = `
# A comment.
mutant  adds wrongly
why     sums are believed
file    pkg/sum/sum.go
tests   ./test/sums TestA TestB
-func add(a, b int) int {
-	return a + b
+func add(a, b int) int {
+	return a - b
`

func TestParse(t *testing.T) {
	mutants, err := parse(example + "\nmutant x\nwhy y\nfile pkg/z/z.go\ntests T\n-z\n")
	if err != nil {
		t.Fatal(err)
	}
	if len(mutants) != 2 {
		t.Fatalf("%d mutants", len(mutants))
	}
	m := mutants[0]
	if m.name != "adds wrongly" || m.why != "sums are believed" || m.file != "pkg/sum/sum.go" || m.pkg != "./test/sums" ||
		!slices.Equal(m.tests, []string{"TestA", "TestB"}) || len(m.old) != 2 || len(m.new) != 2 {
		t.Errorf("%+v", m)
	}
	if m := mutants[1]; m.pkg != "./pkg/z" || m.new != nil {
		t.Errorf("%+v", m)
	}
	for _, bad := range []string{"why it has no name", "mutant x\nwhat is this", "mutant x\nwhy y\nfile z\n-z"} {
		if _, err := parse(bad); err == nil {
			t.Errorf("%q is no list", bad)
		}
	}
}

func TestApply(t *testing.T) {
	mutants, err := parse(example)
	if err != nil {
		t.Fatal(err)
	}
	m := mutants[0]
	const sound = "package sum\n\n  func add(a, b int) int { \n\t\treturn a + b // a sum\n}\n"
	faulty, err := m.apply(sound)
	if err != nil || faulty != strings.Replace(strings.Replace(sound, "{ \n\t\t", "{\n\t", 1), "+", "-", 1) {
		t.Errorf("%v: %q", err, faulty)
	}
	for text, want := range map[string]string{
		"package sum\n":    "0 times",
		sound + sound[11:]: "2 times",
		"package sum\nfunc add(a, b int) int {\nreturn a + b\n": "no Go",
	} {
		if _, err := m.apply(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	m.new = m.old
	if _, err := m.apply(strings.ReplaceAll(sound, "{ \n\t\t", "{\n\t")); err == nil || !strings.Contains(err.Error(), "changes nothing") {
		t.Error(err)
	}
}

func TestVerdict(t *testing.T) {
	for _, tt := range []struct {
		output string
		failed bool
		kind   kind
		by     string
	}{
		{"ok  \tx\t0.1s\n", false, survived, ""},
		{"--- FAIL: TestA (0.00s)\n    a_test.go:1: no\n    --- FAIL: TestA/b (0.00s)\n        --- FAIL: TestA/b/c (0.00s)\nFAIL\n", true, killed, "TestA/b/c"},
		{"--- FAIL: TestA (0.00s)\n--- FAIL: TestB (0.00s)\nFAIL\n", true, killed, "TestA, TestB"},
		{"panic: test timed out after 1m0s\n\trunning tests:\n\t\tTestA (1m0s)\n", true, hung, "TestA"},
		{"testing: warning: no tests to run\nPASS\n", false, broken, ""},
		{"fatal error: all goroutines in bubble are blocked\nFAIL\tx\t0.1s\n", true, killed, "a fatal error"},
	} {
		kind, by := verdict(tt.output, tt.failed)
		if kind != tt.kind || by != tt.by {
			t.Errorf("%q: %s by %q, want %s by %q", tt.output, kind, by, tt.kind, tt.by)
		}
	}
}
