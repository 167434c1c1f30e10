// Suite runs `go test` and sums it up. At the start it says what this machine
// lacks, if anything; then a line for each package, the output of what fails, and
// at the end the first words of each test that failed, and how many passed, failed
// and were left out. A test with subtests counts as those.
//
//	go run ./test/suite -short ./...
//	go run ./test/suite -race ./pkg/... + -run TestX ./test/node
//
// The arguments are those of go test; after a + come those of another run, which
// is made whatever became of the one before. With CI=true nothing may be left out.
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/test/machine"
)

func main() {
	missing := machine.Missing()
	strict := os.Getenv("CI") == "true"
	switch {
	case missing != "" && strict:
		fmt.Fprintf(os.Stderr, "%s: with CI=true nothing may be left out\n", missing)
		os.Exit(1)
	case missing != "":
		fmt.Printf("%s: tests that mount or attach loop devices are left out\n", missing)
	}
	s := suite{out: os.Stdout}
	began := time.Now()
	for args := range split(os.Args[1:], "+") {
		s.run(args)
	}
	text, ok := s.sum(missing, strict)
	fmt.Printf("%s (%s)\n", text, time.Since(began).Round(time.Second))
	if !ok {
		os.Exit(1)
	}
}

// split yields the parts of args between separators.
func split(args []string, separator string) func(yield func([]string) bool) {
	return func(yield func([]string) bool) {
		for {
			i := slices.Index(args, separator)
			if i < 0 {
				yield(args)
				return
			}
			if !yield(args[:i]) {
				return
			}
			args = args[i+1:]
		}
	}
}

// suite is what came of the tests.
type suite struct {
	out             io.Writer
	passed, leftOut int
	failed          []string // and their first words
	unexplained     []string // left out by others than package machine
	broken          bool     // go test failed
}

// run runs go test once.
func (s *suite) run(args []string) {
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		fmt.Fprintln(s.out, err)
		s.broken = true
		return
	}
	s.read(out)
	if cmd.Wait() != nil {
		s.broken = true
	}
}

// event is a line of go test -json (go doc test2json).
type event struct {
	Action  string
	Package string
	Test    string
	Output  string
	Elapsed float64 // seconds
}

// read takes the events of one run.
func (s *suite) read(events io.Reader) {
	type id struct{ pkg, test string }
	texts := map[id][]string{}
	parents := map[id]bool{}
	lines := bufio.NewReader(events)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) != nil {
				fmt.Fprint(s.out, line) // go test says something of its own
				continue
			}
			me := id{e.Package, e.Test}
			switch e.Action {
			case "run":
				if i := strings.LastIndexByte(e.Test, '/'); i > 0 {
					parents[id{e.Package, e.Test[:i]}] = true
				}
			case "build-output":
				fmt.Fprint(s.out, e.Output)
			case "output":
				texts[me] = append(texts[me], e.Output)
			case "pass", "fail", "skip":
				text := texts[me]
				delete(texts, me)
				if e.Test == "" {
					s.ended(e, text)
					continue
				}
				s.count(e, text, parents[me])
			}
		}
		if err != nil {
			break
		}
	}
	// What began and never ended, as the package died: its words are the last ones.
	var unfinished []id
	for me := range texts {
		unfinished = append(unfinished, me)
	}
	slices.SortFunc(unfinished, func(a, b id) int { return strings.Compare(a.pkg+a.test, b.pkg+b.test) })
	for _, me := range unfinished {
		fmt.Fprintf(s.out, "%s %s did not end:\n%s", me.pkg, me.test, strings.Join(texts[me], ""))
	}
}

// ended tells of a package.
func (s *suite) ended(e event, text []string) {
	switch e.Action {
	case "fail":
		s.broken = true
		fmt.Fprint(s.out, strings.Join(text, "")) // ends with FAIL and the package
	case "pass":
		fmt.Fprintf(s.out, "ok    %-60s %6.1fs\n", e.Package, e.Elapsed)
	}
}

// count takes the end of a test.
func (s *suite) count(e event, text []string, parent bool) {
	said, name := strings.Join(text, ""), path.Base(e.Package)+" "+e.Test
	switch {
	case e.Action == "fail":
		fmt.Fprintf(s.out, "%s:\n%s", e.Package, said)
		if !parent {
			s.failed = append(s.failed, name+firstWords(text))
		}
		s.broken = true
	case e.Action == "skip":
		s.leftOut++
		if !strings.Contains(said, machine.LeftOut) {
			s.unexplained = append(s.unexplained, name)
		}
	case !parent:
		s.passed++
	}
}

// A line of testing.T begins with its place.
var place = regexp.MustCompile(`^ +[a-z0-9_]+\.go:[0-9]+: `)

// firstWords returns what a test says itself, beginning with its seed, if it draws one:
// the log of a plugin that follows may be of thousands of lines.
func firstWords(text []string) string {
	const atMost, length = 30, 300
	var words strings.Builder
	said := slices.DeleteFunc(slices.Clone(text), func(line string) bool { return !place.MatchString(line) })
	for _, line := range said[:min(len(said), atMost)] {
		fmt.Fprintf(&words, "\n%.*s", length, strings.TrimRight(line, "\n"))
	}
	return words.String()
}

// sum returns the last lines, and whether all is well.
func (s *suite) sum(missing string, strict bool) (text string, ok bool) {
	for _, name := range s.failed {
		text += "failed: " + name + "\n"
	}
	for _, name := range s.unexplained {
		text += "left out, which only package machine may do: " + name + "\n"
	}
	ok = !s.broken && len(s.failed)+len(s.unexplained) == 0 && (s.leftOut == 0 || !strict)
	text += map[bool]string{true: "ok", false: "FAILED"}[ok] + fmt.Sprintf(": %d tests passed", s.passed)
	if len(s.failed) > 0 {
		text += fmt.Sprintf(", %d failed", len(s.failed))
	}
	if s.leftOut > 0 {
		text += fmt.Sprintf("; %d left out: %s", s.leftOut, missing)
	}
	return text, ok
}
