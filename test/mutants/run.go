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
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// kind is how a run of tests ended.
type kind string

const (
	killed   kind = "killed"
	hung     kind = "killed, for it hung"
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

const (
	testTimeout = time.Minute     // of a mutant's tests; who hangs is killed
	runTimeout  = 5 * time.Minute // of the compiler, too
)

// runner runs tests of the module at root. Its methods may be called concurrently.
type runner struct {
	root    string
	scratch string // a directory of this process
	all     bool   // run all tests of a package, and do not stop at the first failure
}

// mutant runs the tests that must fail once the fault is there.
func (r *runner) mutant(ctx context.Context, m *mutant) result {
	path := filepath.Join(r.root, m.file)
	text, err := os.ReadFile(path)
	if err != nil {
		return result{kind: broken, output: err.Error()}
	}
	faulty, err := m.apply(string(text))
	if err != nil {
		return result{kind: broken, output: err.Error()}
	}
	return r.tests(ctx, m.pkg, m.tests, map[string]string{path: faulty})
}

// tests runs tests of a package with other texts for some of its files.
func (r *runner) tests(ctx context.Context, pkg string, names []string, instead map[string]string) (res result) {
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
	timeout := testTimeout
	if r.all {
		timeout = runTimeout
	}
	args := []string{"test", "-count=1", "-vet=off", "-timeout", timeout.String()}
	if !r.all {
		args = append(args, "-failfast", "-run", "^("+strings.Join(names, "|")+")$")
	}
	if len(instead) > 0 {
		overlay, err := writeOverlay(dir, instead)
		if err != nil {
			return result{kind: broken, output: err.Error()}
		}
		args = append(args, "-overlay", overlay)
	}
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append(args, pkg)...)
	cmd.Dir = r.root
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	cmd.WaitDelay = 10 * time.Second
	output, err := cmd.CombinedOutput()
	res = result{output: string(output), took: time.Since(start)}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) || ctx.Err() != nil {
		res.kind, res.output = broken, res.output+errors.Join(err, ctx.Err()).Error()
		return res
	}
	res.kind, res.by = verdict(res.output, err != nil)
	return res
}

// writeOverlay writes the texts into dir and returns the path of the file that
// go's -overlay takes.
func writeOverlay(dir string, instead map[string]string) (string, error) {
	replace := map[string]string{}
	for path, text := range instead {
		replace[path] = filepath.Join(dir, filepath.Base(path))
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

var (
	failLine    = regexp.MustCompile(`(?m)^ *--- FAIL: (\S+)`)
	timedOut    = regexp.MustCompile(`panic: test timed out after .*\n\s*running tests:\n\s*(\S+)`)
	failedRun   = regexp.MustCompile(`(?m)^FAIL\t`)
	neverBegun  = regexp.MustCompile(`\[(build|setup) failed\]|no tests to run`)
	failureSeen = regexp.MustCompile(`(?m)^(panic|fatal error|exit status|signal): `)
)

// verdict says how tests ended by what go test wrote.
func verdict(output string, failed bool) (kind, string) {
	if neverBegun.MatchString(output) {
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
	switch {
	case len(by) > 0:
		return killed, strings.Join(by, ", ")
	case failedRun.MatchString(output) || failureSeen.MatchString(output):
		return killed, "a fatal error"
	}
	return broken, ""
}

// detachBelow detaches the loop devices over files below dir, and those over
// them, which tests have left behind.
func detachBelow(dir string) error {
	var errs []error
	backings, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return err
	}
	left := map[string]string{} // device by backing
	for _, path := range backings {
		if raw, err := os.ReadFile(path); err == nil { // else it has gone meanwhile
			left["/dev/"+filepath.Base(filepath.Dir(filepath.Dir(path)))] = strings.TrimSpace(string(raw))
		}
	}
	for device, backing := range left {
		if strings.HasPrefix(backing, dir+"/") || strings.HasPrefix(left[backing], dir+"/") {
			errs = append(errs, detach(device))
		}
	}
	return errors.Join(errs...)
}

func detach(device string) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	err = unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0)
	if errors.Is(err, unix.ENXIO) {
		err = nil
	}
	if err != nil {
		err = fmt.Errorf("detach %s: %w", device, err)
	}
	return errors.Join(err, f.Close())
}

// sound runs the tests that the mutants name without any fault, or else every
// mutant would look killed.
func (r *runner) sound(ctx context.Context, mutants []*mutant) error {
	names := map[string][]string{}
	var pkgs []string
	for _, m := range mutants {
		if names[m.pkg] == nil {
			pkgs = append(pkgs, m.pkg)
		}
		for _, name := range m.tests {
			if !slices.Contains(names[m.pkg], name) {
				names[m.pkg] = append(names[m.pkg], name)
			}
		}
	}
	for _, pkg := range pkgs {
		res := r.tests(ctx, pkg, names[pkg], nil)
		if res.kind != survived {
			return fmt.Errorf("the tests of %s fail without any mutant:\n%s", pkg, res.output)
		}
		fmt.Printf("sound   %5.1fs  %s: %d tests pass without a mutant\n", res.took.Seconds(), pkg, len(names[pkg]))
	}
	return nil
}
