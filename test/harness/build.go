// Package harness runs the built csi-node binary on directories of its own, as
// a child of the test, on the real kernel: it starts, kills and restarts it,
// speaks CSI to it, and at the end of the test makes sure that nothing is left
// on the machine.
//
// It needs root. A test package that uses it ends through Main.
package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
)

// Main runs the tests of a package and removes the binaries that were built
// for them. It does not return.
func Main(m *testing.M) {
	code := 1
	if os.Geteuid() == 0 {
		code = m.Run()
	} else {
		fmt.Fprintln(os.Stderr, "these tests mount file systems: run them as root")
	}
	dir, err := buildDir()
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, "remove the binaries:", err)
		code = 1
	}
	os.Exit(code)
}

// Each binary is built once a test process, when it is first asked for.
var (
	buildDir = sync.OnceValues(func() (string, error) { return os.MkdirTemp("", "csi-node-build-") })
	fast     = sync.OnceValues(func() (string, error) { return build("csi-node-fast") })
	plain    = sync.OnceValues(func() (string, error) { return build("csi-node", "-race") })
	faulty   = sync.OnceValues(func() (string, error) { return build("csi-node-faults", "-race", "-tags", "faults") })
)

// Binary returns the path of the csi-node binary, built with the race detector
// but for a benchmark.
func Binary(t testing.TB) string {
	t.Helper()
	if _, benchmark := t.(*testing.B); benchmark {
		return built(t, fast)
	}
	return built(t, plain)
}

// FaultsBinary is Binary with the faults tag, which makes CSI_NODE_FAULT work.
func FaultsBinary(t testing.TB) string {
	t.Helper()
	return built(t, faulty)
}

func built(t testing.TB, binary func() (string, error)) string {
	t.Helper()
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

func build(name string, flags ...string) (string, error) {
	dir, err := buildDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)
	args := append([]string{"build", "-o", path}, flags...)
	out, err := exec.Command("go", append(args, "github.com/csi-node/csi-node/cmd/csi-node")...).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", name, err, out)
	}
	return path, nil
}
