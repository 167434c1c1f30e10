package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

func TestSuite(t *testing.T) {
	for name, tt := range map[string]struct {
		events []string
		strict bool
		last   string
		ok     bool
		says   []string
	}{
		"subtests count, and not their parent": {[]string{
			`{"Action":"run","Package":"p","Test":"TestA"}`,
			`{"Action":"run","Package":"p","Test":"TestA/x"}`,
			`{"Action":"run","Package":"p","Test":"TestA/y"}`,
			`{"Action":"pass","Package":"p","Test":"TestA/x"}`,
			`{"Action":"pass","Package":"p","Test":"TestA/y"}`,
			`{"Action":"pass","Package":"p","Test":"TestA"}`,
			`{"Action":"run","Package":"p","Test":"TestB"}`,
			`{"Action":"pass","Package":"p","Test":"TestB"}`,
			`{"Action":"pass","Package":"p","Elapsed":1.5}`,
		}, true, "ok: 3 tests passed", true, []string{"ok    p", "1.5s"}},
		"left out": {[]string{
			`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: left out: no root\n"}`,
			`{"Action":"skip","Package":"p","Test":"TestA"}`,
			`{"Action":"pass","Package":"p"}`,
		}, false, "ok: 0 tests passed; 1 left out: no root", true, nil},
		"left out, and nothing may be": {[]string{
			`{"Action":"output","Package":"p","Test":"TestA","Output":"    a_test.go:1: left out: no root\n"}`,
			`{"Action":"skip","Package":"p","Test":"TestA"}`,
		}, true, "FAILED: 0 tests passed; 1 left out: no root", false, nil},
		"skipped by itself": {[]string{
			`{"Action":"skip","Package":"m/p","Test":"TestA"}`,
		}, false, "FAILED: 0 tests passed; 1 left out: no root", false, []string{"only package machine may do: p TestA"}},
		"a test that fails": {[]string{
			`{"Action":"output","Package":"m/p","Test":"TestA","Output":"why\n"}`,
			`{"Action":"fail","Package":"m/p","Test":"TestA"}`,
			`{"Action":"output","Package":"m/p","Output":"FAIL\tm/p\n"}`,
			`{"Action":"fail","Package":"m/p"}`,
		}, false, "FAILED: 0 tests passed, 1 failed", false, []string{"m/p:\nwhy\n", "FAIL\tm/p\n", "failed: p TestA\n"}},
		"a test that fails beside much that others say": {[]string{
			`{"Action":"output","Package":"m/p","Test":"TestA","Output":"    a_test.go:1: seed 7\n"}`,
			`{"Action":"output","Package":"m/p","Test":"TestA","Output":"    a_test.go:2: it is torn\n"}`,
			`{"Action":"output","Package":"m/p","Test":"TestA","Output":"        the log of a plugin\n"}`,
			`{"Action":"fail","Package":"m/p","Test":"TestA"}`,
			`{"Action":"fail","Package":"m/p"}`,
		}, false, "FAILED: 0 tests passed, 1 failed", false, []string{"the log of a plugin\n", "failed: p TestA\n    a_test.go:1: seed 7\n    a_test.go:2: it is torn\nFAILED"}},
		"a package that does not build": {[]string{
			`{"Action":"build-output","Output":"undefined: x\n"}`,
			`{"Action":"output","Package":"m/p","Output":"FAIL\tm/p [build failed]\n"}`,
			`{"Action":"fail","Package":"m/p"}`,
		}, false, "FAILED: 0 tests passed", false, []string{"undefined: x", "[build failed]"}},
		"a test that never ends": {[]string{
			`{"Action":"run","Package":"p","Test":"TestA"}`,
			`{"Action":"output","Package":"p","Test":"TestA","Output":"its words\n"}`,
			`{"Action":"fail","Package":"p"}`,
		}, false, "FAILED: 0 tests passed", false, []string{"p TestA did not end:\nits words\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			s := suite{out: &out}
			s.read(strings.NewReader(strings.Join(tt.events, "\n")))
			text, ok := s.sum("no root", tt.strict)
			lines := strings.Split(text, "\n")
			if last := lines[len(lines)-1]; last != tt.last || ok != tt.ok {
				t.Errorf("the last line is %q, %t; want %q, %t", last, ok, tt.last, tt.ok)
			}
			for _, words := range tt.says {
				if !strings.Contains(out.String()+text, words) {
					t.Errorf("no %q in:\n%s%s", words, &out, text)
				}
			}
		})
	}
}

func TestSplit(t *testing.T) {
	var parts []string
	for part := range split([]string{"-a", "b", "+", "-c"}, "+") {
		parts = append(parts, strings.Join(part, " "))
	}
	if !slices.Equal(parts, []string{"-a b", "-c"}) {
		t.Errorf("%q", parts)
	}
}
