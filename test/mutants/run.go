package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/csi-node/csi-node/test/machine"
)

// kind is how a run of tests ended.
type kind string

const (
	killed   kind = "killed"
	hung     kind = "killed, for it hung,"
	survived kind = "SURVIVED"
	broken   kind = "BROKEN" // an error of the list, or of the machine
)

// result is the outcome of a run.
type result struct {
	kind   kind
	by     string // the tests that failed
	output string
	took   time.Duration
}

// Who hangs is killed: the short tests of one mutant have mutantTime, and five times
// what those of the program took without one; whole tests have wholeTime.
const (
	mutantTime = time.Minute
	wholeTime  = 10 * time.Minute
)

// build is a test program of a package with mutants asleep in it. A mutant that
// cannot be woven has a program of its own, in which it is awake.
type build struct {
	pkg     string
	checks  []string // tests of all mutants of the package, which must pass while all sleep
	ids     map[*mutant]int
	mutants []*mutant
	files   map[string]string // other texts for files, by their paths
	program string
	limit   time.Duration // of a short run with a mutant
}

// runner makes and runs test programs of the module at root. Its methods may be
// called concurrently.
type runner struct {
	root    string
	scratch string // a directory of this process
	all     bool   // run all tests of a package, and do not stop at the first failure
	skip    string // but these, a regular expression
}

// plan sorts mutants into programs.
func (r *runner) plan(mutants []*mutant) ([]*build, error) {
	var builds []*build
	together := map[string]*build{}
	files := map[string]map[string]*woven{} // by package and path
	for i, m := range mutants {
		path := filepath.Join(r.root, m.file)
		text, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		faulty, err := m.apply(string(text))
		if err != nil {
			return nil, fmt.Errorf("mutant %q: %w", m.name, err)
		}
		b := together[m.pkg]
		if b == nil {
			b = &build{pkg: m.pkg, ids: map[*mutant]int{}, files: map[string]string{}}
			together[m.pkg], files[m.pkg] = b, map[string]*woven{}
			builds = append(builds, b)
		}
		b.checks = append(b.checks, m.tests...)
		w := files[m.pkg][path]
		if w == nil {
			w = &woven{text: string(text)}
		}
		asleep, err := w.weave(i+1, m, faulty)
		switch {
		case err != nil:
			return nil, fmt.Errorf("mutant %q: %w", m.name, err)
		case !asleep:
			builds = append(builds, &build{pkg: m.pkg, mutants: []*mutant{m}, limit: 2 * mutantTime, files: map[string]string{path: faulty}})
			continue
		}
		files[m.pkg][path] = w
		b.ids[m] = i + 1
		b.mutants = append(b.mutants, m)
	}
	for pkg, b := range together {
		for path, w := range files[pkg] {
			b.files[path] = w.file()
			b.files[switchPath(path)] = switchFile(packageName(w.text))
		}
	}
	return builds, nil
}

var packageLine = regexp.MustCompile(`(?m)^package (\w+)`)

func packageName(text string) string { return packageLine.FindStringSubmatch(text)[1] }

// make compiles the program; the error holds what the compiler said.
func (r *runner) make(ctx context.Context, b *build) error {
	dir, err := os.MkdirTemp(r.scratch, "")
	if err != nil {
		return err
	}
	overlay, err := writeOverlay(dir, b.files)
	if err != nil {
		return err
	}
	b.program = filepath.Join(dir, "test")
	cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-overlay", overlay, "-o", b.program, b.pkg)
	cmd.Dir = r.root
	if output, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s with its mutants: %w\n%s", b.pkg, err, output)
	}
	return nil
}

// writeOverlay writes the texts into dir and returns the path of the file that
// go's -overlay takes.
func writeOverlay(dir string, files map[string]string) (string, error) {
	replace := map[string]string{}
	for path, text := range files {
		replace[path] = filepath.Join(dir, strconv.Itoa(len(replace))+".go")
		if err := os.WriteFile(replace[path], []byte(text), 0o600); err != nil {
			return "", err
		}
	}
	raw, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, raw, 0o600)
}

// run runs the tests that must fail while the mutant is awake: first as go test -short
// has them, which is quick and enough for nearly all, then whole, in which case they
// must pass whole while it sleeps.
func (r *runner) run(ctx context.Context, b *build, m *mutant) result {
	awake := ""
	id, woven := b.ids[m]
	if woven {
		awake = strconv.Itoa(id)
	}
	var short result
	if !r.all {
		if short = r.tests(ctx, b, b.limit, m.tests, awake, "-test.short"); short.kind != survived {
			return short
		}
	}
	whole := r.tests(ctx, b, wholeTime, m.tests, awake)
	whole.took += short.took
	if r.all || !woven || whole.kind != killed && whole.kind != hung {
		return whole
	}
	if asleep := r.tests(ctx, b, wholeTime, m.tests, ""); asleep.kind != survived {
		return result{kind: broken, output: "its tests fail without it:\n" + asleep.output, took: whole.took + asleep.took}
	}
	return whole
}

// sound runs the tests that the mutants name, short, while all are asleep: a test that
// fails then kills nothing.
func (r *runner) sound(ctx context.Context, b *build) result {
	slices.Sort(b.checks)
	res := r.tests(ctx, b, wholeTime, slices.Compact(b.checks), "", "-test.short")
	b.limit = mutantTime + 5*res.took
	return res
}

// tests runs tests of a program for so long at most, with more flags of it.
func (r *runner) tests(ctx context.Context, b *build, limit time.Duration, names []string, awake string, flags ...string) (res result) {
	start := time.Now()
	dir, err := os.MkdirTemp(r.scratch, "")
	if err != nil {
		return result{kind: broken, output: err.Error()}
	}
	defer func() {
		if err := errors.Join(detachBelow(dir), os.RemoveAll(dir)); err != nil {
			res.kind, res.output = broken, res.output+"\ncleaning up: "+err.Error()
		}
	}()
	args := append([]string{"-test.timeout", limit.String(), "-test.skip", r.skip}, flags...)
	if !r.all {
		args = append(args, "-test.failfast", "-test.run", pattern(names))
	}
	ctx, cancel := context.WithTimeout(ctx, limit+10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, b.program, args...)
	cmd.Dir = filepath.Join(r.root, b.pkg)
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, envName+"="+awake)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.WaitDelay = 5 * time.Second
	output, err := cmd.CombinedOutput()
	res = result{output: string(output), took: time.Since(start)}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		res.kind, res.output = broken, fmt.Sprintf("%s\n%v %v", res.output, err, ctx.Err())
		return res
	}
	res.kind, res.by = verdict(res.output, err != nil)
	return res
}

// pattern returns what go test -run takes for the tests; of a subtest a part of
// its name will do.
func pattern(names []string) string {
	var patterns []string
	for _, name := range names {
		test, sub, found := strings.Cut(name, "/")
		if test = "^" + test + "$"; found {
			test += "/" + sub
		}
		patterns = append(patterns, test)
	}
	return strings.Join(patterns, "|")
}

var (
	failLine = regexp.MustCompile(`(?m)^ *--- FAIL: (\S+)`)
	timedOut = regexp.MustCompile(`panic: test timed out after .*\n\s*running tests:\n\s*(\S+)`)
)

// verdict says how tests ended by what they wrote.
func verdict(output string, failed bool) (kind, string) {
	if !failed && strings.Contains(output, "no tests to run") {
		return broken, ""
	}
	if !failed {
		return survived, ""
	}
	if match := timedOut.FindStringSubmatch(output); match != nil {
		return hung, match[1]
	}
	var by []string
	for _, match := range failLine.FindAllStringSubmatch(output, -1) {
		if last := len(by) - 1; last >= 0 && strings.HasPrefix(match[1], by[last]+"/") {
			by[last] = match[1]
		} else if last < 0 || !strings.Contains(match[1], "/") {
			by = append(by, match[1])
		}
	}
	if len(by) == 0 {
		return killed, "a fatal error"
	}
	return killed, strings.Join(by, ", ")
}

// detachBelow detaches the loop devices over files below dir, and those over
// them, which tests have left behind.
func detachBelow(dir string) error {
	var errs []error
	backings, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	left := map[string]string{} // backing by device
	for _, path := range backings {
		if raw, err := os.ReadFile(path); err == nil { // else it has gone meanwhile
			left["/dev/"+filepath.Base(filepath.Dir(filepath.Dir(path)))] = strings.TrimSpace(string(raw))
		}
	}
	for device, backing := range left {
		if strings.HasPrefix(backing, dir+"/") || strings.HasPrefix(left[backing], dir+"/") {
			_, err := machine.Detach(device, backing)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
