// Package harness runs the built csi-node binary on directories of its own, as
// a child of the test, on the real kernel: it starts, kills and restarts it,
// speaks CSI to it, and at the end of the test makes sure that nothing is left
// on the machine.
//
// A plugin needs root and more: see package machine. A test package that uses it
// ends through Main.
package harness

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

// Main runs the tests of a package, a *testing.M, and removes the binaries that were
// built for them. It does not return.
func Main(m interface{ Run() int }) {
	code := m.Run()
	dir, err := buildDir()
	if err = errors.Join(err, os.RemoveAll(dir)); err != nil {
		fmt.Fprintln(os.Stderr, "remove the binaries:", err)
		code = 1
	}
	os.Exit(code)
}

// Prebuilt names the environment variable of a directory that holds the
// binaries already, as BuildAll leaves them there. Nothing is built then: a guest
// that runs these tests has no Go.
const Prebuilt = "CSI_NODE_BINARIES"

const module = "github.com/csi-node/csi-node/"

// Each binary is built once a test process, when it is first asked for.
var (
	buildDir = sync.OnceValues(func() (string, error) { return os.MkdirTemp("", "csi-node-build-") })
	fast     = sync.OnceValues(func() (string, error) { return find("csi-node-fast") })
	plain    = sync.OnceValues(func() (string, error) { return find("csi-node", raceFlags...) })
	faulty   = sync.OnceValues(func() (string, error) { return find("csi-node-faults", raceFlags...) })
	sanity   = sync.OnceValues(func() (string, error) { return find("csi-sanity") })
)

// binaries are the go build arguments that make each binary: a package at the end.
var binaries = map[string][]string{
	"csi-node":        {module + "cmd/csi-node"},
	"csi-node-fast":   {module + "cmd/csi-node"},
	"csi-node-faults": {"-tags", "faults", module + "cmd/csi-node"},
	"csi-sanity":      {"github.com/kubernetes-csi/csi-test/v5/cmd/csi-sanity"},
}

// Binary returns the path of the csi-node binary, built with the race detector
// but for a benchmark.
func Binary(t testing.TB) string {
	t.Helper()
	if _, benchmark := t.(*testing.B); benchmark {
		return found(t, fast)
	}
	return found(t, plain)
}

// FaultsBinary is Binary with the faults tag, which makes CSI_NODE_FAULT work.
func FaultsBinary(t testing.TB) string {
	t.Helper()
	return found(t, faulty)
}

// SanityBinary returns the path of csi-sanity.
func SanityBinary(t testing.TB) string {
	t.Helper()
	return found(t, sanity)
}

func found(t testing.TB, binary func() (string, error)) string {
	t.Helper()
	path, err := binary()
	require.NoError(t, err)
	return path
}

// find returns the path of a binary, which is built unless it is there already.
func find(name string, flags ...string) (string, error) {
	if dir := os.Getenv(Prebuilt); dir != "" {
		path := filepath.Join(dir, name)
		_, err := os.Stat(path)
		return path, err
	}
	dir, err := buildDir()
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)
	return path, build(path, nil, flags...)
}

// BuildAll builds every binary that the tests, not the benchmarks, run into dir, static and without
// the race detector, for a machine on which Prebuilt names a copy of dir.
func BuildAll(dir string) error {
	for _, name := range []string{"csi-node", "csi-node-faults", "csi-sanity"} {
		if err := build(filepath.Join(dir, name), []string{"CGO_ENABLED=0"}, "-ldflags", "-s -w"); err != nil {
			return err
		}
	}
	return nil
}

func build(path string, env []string, flags ...string) error {
	name := filepath.Base(path)
	cmd := exec.Command("go", slices.Concat([]string{"build", "-o", path}, flags, binaries[name])...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", name, err, out)
	}
	return nil
}
