//go:build upstream

package e2e

import (
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

var (
	upstreamFocus  = flag.String("upstream.focus", "", "run only the tests whose names match, beneath External Storage")
	upstreamReport = flag.String("upstream.report", "", "write upstream.md to this directory when all has run")
)

// notHere are the tests that cannot run on this cluster.
const notHere = `\[Feature:SELinux\]|\[Feature:Windows\]|\[Disruptive\]`

// spec is a test of Kubernetes' suite, as ginkgo reports it.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeText, State     string
	Failure                 struct{ Message string }
}

func (s spec) name() string {
	return strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")
}

// TestUpstream: the storage tests of Kubernetes pass for the driver that testdriver.yaml describes.
func TestUpstream(t *testing.T) {
	driver, err := filepath.Abs("testdriver.yaml")
	if err != nil {
		t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(the.logs(), "upstream.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.CommandContext(context.Background(), the.built["ginkgo"], "run", "--procs=2", "--no-color", "--timeout=4h",
		"--focus=External.Storage.*"+*upstreamFocus, "--skip="+notHere,
		"--output-dir="+the.logs(), "--json-report=upstream.json", "--junit-report=upstream.xml", the.built["e2e.test"], "--",
		"-storage.testdriver="+driver, "-kubeconfig="+the.kubeconfig("admin"), "-kubectl-path="+the.built["kubectl"], "-provider=local",
		"-e2e-output-dir="+the.logs(), "-disable-log-dump")
	cmd.Stdout, cmd.Stderr = log, log
	say("the tests of Kubernetes run; see %s", log.Name())
	stop := heartbeat("they still run")
	runErr := cmd.Run()
	stop()
	specs := readSpecs(t, filepath.Join(the.logs(), "upstream.json"))
	count := map[string]int{}
	for _, s := range specs {
		count[s.State]++
		if s.State != "passed" && s.State != "skipped" {
			t.Errorf("%s: %s\n%s", s.State, s.name(), s.Failure.Message)
		}
	}
	t.Logf("tests by result: %v", count)
	if runErr != nil {
		t.Errorf("ginkgo: %v", runErr)
	}
	if count["passed"] == 0 {
		t.Error("none has passed")
	}
	assertNothingLeft(t)
}

// readSpecs reads the tests of external storage in ginkgo's report.
func readSpecs(t *testing.T, path string) (all []spec) {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(text, &suites); err != nil {
		t.Fatal(err)
	}
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			if len(s.ContainerHierarchyTexts) > 0 && strings.HasPrefix(s.ContainerHierarchyTexts[0], "External Storage") {
				all = append(all, s)
			}
		}
	}
	return all
}
