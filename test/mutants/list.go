package main

import (
	"embed"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

//go:embed list/*.txt
var lists embed.FS

// mutant is one small fault.
type mutant struct {
	name, why string
	file      string   // from the module's root
	pkg       string   // whose tests must fail, as "./pkg/state"
	tests     []string // their names
	old, new  []string // lines
}

// readLists reads all lists; a name stands for one mutant.
func readLists() ([]*mutant, error) {
	paths, err := fs.Glob(lists, "list/*.txt")
	if err != nil {
		return nil, err
	}
	var all []*mutant
	seen := map[string]bool{}
	for _, p := range paths {
		text, err := fs.ReadFile(lists, p)
		if err != nil {
			return nil, err
		}
		mutants, err := parse(string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		for _, m := range mutants {
			if seen[m.name] {
				return nil, fmt.Errorf("%s: mutant %q: there are two of that name", p, m.name)
			}
			seen[m.name] = true
		}
		all = append(all, mutants...)
	}
	return all, nil
}

// parse reads one list: mutants between empty lines, and comments.
func parse(text string) ([]*mutant, error) {
	var all []*mutant
	var m *mutant
	for i, line := range strings.Split(text, "\n") {
		fail := func(why string) error { return fmt.Errorf("line %d: %s", i+1, why) }
		key, value, _ := strings.Cut(line, " ")
		value = strings.TrimSpace(value)
		switch {
		case strings.TrimSpace(line) == "":
			m = nil
		case strings.HasPrefix(line, "#"):
		case key == "mutant":
			m = &mutant{name: value}
			all = append(all, m)
		case m == nil:
			return nil, fail(`a mutant begins with "mutant"`)
		case line[0] == '-':
			m.old = append(m.old, line[1:])
		case line[0] == '+':
			m.new = append(m.new, line[1:])
		case key == "why":
			m.why = value
		case key == "file":
			m.file, m.pkg = value, "./"+path.Dir(value)
		case key == "tests":
			m.tests = strings.Fields(value)
			if len(m.tests) > 0 && strings.HasPrefix(m.tests[0], "./") {
				m.pkg, m.tests = m.tests[0], m.tests[1:]
			}
		default:
			return nil, fail("it is none of mutant, why, file, tests, - and +")
		}
	}
	for _, m := range all {
		if m.name == "" || m.why == "" || m.file == "" || len(m.tests) == 0 || len(m.old) == 0 {
			return nil, fmt.Errorf("mutant %q: a name, why, file, tests and - are needed", m.name)
		}
	}
	return all, nil
}

// apply returns the file's text with the fault in it.
func (m *mutant) apply(text string) (string, error) {
	lines := make([]string, len(m.old))
	for i, line := range m.old {
		lines[i] = regexp.QuoteMeta(strings.TrimSpace(line))
	}
	found := regexp.MustCompile(strings.Join(lines, `[ \t]*\n[ \t]*`)).FindAllStringIndex(text, -1)
	if len(found) != 1 {
		return "", fmt.Errorf("%s has its lines %d times, not once", m.file, len(found))
	}
	faulty := text[:found[0][0]] + strings.TrimSpace(strings.Join(m.new, "\n")) + text[found[0][1]:]
	if faulty == text {
		return "", errors.New("it changes nothing")
	}
	if _, err := parser.ParseFile(token.NewFileSet(), m.file, faulty, 0); err != nil {
		return "", fmt.Errorf("it is no Go: %w", err)
	}
	return faulty, nil
}

// check returns what is out of date about a mutant of the module at root, whose
// packages have the tests.
func (m *mutant) check(root string, tests func(pkg string) []string) error {
	text, err := os.ReadFile(filepath.Join(root, m.file))
	if err == nil {
		_, err = m.apply(string(text))
	}
	if err != nil {
		return err
	}
	there := tests(m.pkg)
	for _, name := range m.tests {
		if name, _, _ := strings.Cut(name, "/"); !slices.Contains(there, name) {
			return fmt.Errorf("%s has no test %s", m.pkg, name)
		}
	}
	return nil
}

var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w*)\(`)

// testsOf returns the names of the tests in a directory.
func testsOf(dir string) ([]string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		for _, match := range testFunc.FindAllStringSubmatch(string(text), -1) {
			names = append(names, match[1])
		}
	}
	return names, nil
}
