//go:build upstream

package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

var (
	upstreamFocus  = flag.String("upstream.focus", "", "run only those of External Storage whose names match")
	upstreamReport = flag.String("upstream.report", "", "write upstream.md to this directory when all have run")
)

// TestUpstream: the storage tests of Kubernetes pass for the driver that testdriver.yaml describes.
func TestUpstream(t *testing.T) {
	login, err := the.startSSH()
	if err != nil {
		t.Fatal(err)
	}
	var specs []spec
	complete := true
	for _, phase := range []struct{ name, labels, processes string }{
		{"together", "!Disruptive", "2"},
		{"alone", "Disruptive", "1"}, // they restart kubelet
	} {
		t.Run(phase.name, func(t *testing.T) {
			report := "upstream-" + phase.name
			log, err := os.Create(filepath.Join(the.logs(), report+".log"))
			if err != nil {
				t.Fatal(err)
			}
			defer log.Close()
			driver, err := filepath.Abs("testdriver.yaml")
			if err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command(the.built["ginkgo"], "run", "--procs="+phase.processes, "--label-filter="+phase.labels, "--no-color", "--timeout=4h",
				"--focus=External.Storage.*"+*upstreamFocus, "--skip="+leftOut,
				"--output-dir="+the.logs(), "--json-report="+report+".json", "--junit-report="+report+".xml", the.built["e2e.test"], "--",
				"-storage.testdriver="+driver, "-kubeconfig="+the.kubeconfig("admin"), "-kubectl-path="+the.built["kubectl"], "-provider=local",
				"-e2e-output-dir="+the.logs(), "-disable-log-dump")
			cmd.Env, cmd.Stdout, cmd.Stderr = append(os.Environ(), login...), log, log
			say("%s: see %s", cmd, log.Name())
			stop := heartbeat("the tests of Kubernetes still run")
			runErr := cmd.Run()
			stop()
			ran, err := readSpecs(filepath.Join(the.logs(), report+".json"))
			if err != nil {
				complete = false
				t.Fatal(runErr, err)
			}
			count := map[string]int{}
			for _, s := range ran {
				count[s.State]++
				if s.failed() {
					t.Errorf("%s: %s\n%s", s.State, s.name(), s.Failure.Message)
				}
			}
			t.Logf("%v", count)
			if runErr != nil && !t.Failed() {
				t.Error(runErr)
			}
			specs = append(specs, ran...)
			assertNothingLeft(t)
		})
	}
	if !slices.ContainsFunc(specs, func(s spec) bool { return s.State == "passed" }) {
		t.Error("no test has passed")
	}
	if complete && *upstreamFocus == "" && *upstreamReport != "" {
		if err := os.WriteFile(filepath.Join(*upstreamReport, "upstream.md"), []byte(upstreamPage(specs)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// readSpecs reads the tests of external storage that ginkgo has run, or that skipped themselves.
func readSpecs(path string) (all []spec, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			selected := s.State != "skipped" || s.Failure.Message != ""
			if len(s.ContainerHierarchyTexts) > 1 && strings.HasPrefix(s.ContainerHierarchyTexts[0], "External Storage") && selected {
				all = append(all, s)
			}
		}
	}
	return all, nil
}
