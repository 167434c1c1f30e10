package e2e

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

const kubernetesVersion = "v1.36.3" // as in build/go.mod

// buildModule is the directory, relative to this one, of the go.mod that pins what is built.
const buildModule = "build"

// compileFlags have the compiler leave out what nobody looks at, and the inlining, which takes it a quarter of its time.
const compileFlags = "-gcflags=all=-dwarf=false -l"

type program struct {
	pkg, ldflags string
	test         bool // the package's tests are the program
}

func programs() []program {
	var all []program
	for _, name := range []string{"kubectl", "kubelet", "kube-apiserver", "kube-controller-manager", "kube-scheduler"} {
		all = append(all, program{pkg: "k8s.io/kubernetes/cmd/" + name, ldflags: kubernetesLdflags()})
	}
	all = append(all,
		program{pkg: "github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner", ldflags: "-X main.version=v6.3.0"},
		program{pkg: "github.com/kubernetes-csi/external-resizer/v2/cmd/csi-resizer", ldflags: "-X main.version=v2.3.0"},
		program{pkg: "helm.sh/helm/v4/cmd/helm"})
	if upstream {
		all = append(all, upstreamPrograms()...)
	}
	return all
}

// kubernetesLdflags tells the programs their version.
func kubernetesLdflags() string {
	var flags []string
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, set := range []string{"gitVersion=" + kubernetesVersion, "gitMajor=1", "gitMinor=36", "gitTreeState=clean", "buildDate=1970-01-01T00:00:00Z"} {
			flags = append(flags, "-X "+pkg+"."+set)
		}
	}
	return strings.Join(flags, " ")
}

func (p program) name() string {
	if p.test {
		return filepath.Base(p.pkg) + ".test"
	}
	return filepath.Base(p.pkg)
}

// command is what makes go build it.
func (p program) command() []string {
	if p.test {
		return []string{"test", "-c", "-vet=off"}
	}
	return []string{"build"}
}

// path returns where the program is kept: beneath cache, by all that decides what it is.
func (p program) path(cache string) (string, error) {
	hash := sha256.New()
	fmt.Fprintln(hash, runtime.Version(), runtime.GOARCH, compileFlags, p.ldflags)
	for _, file := range []string{"go.mod", "go.sum"} {
		text, err := os.ReadFile(filepath.Join(buildModule, file))
		if err != nil {
			return "", err
		}
		hash.Write(text)
	}
	return filepath.Join(cache, "bin", hex.EncodeToString(hash.Sum(nil))[:16], p.name()), nil
}

// buildAll builds what is not in the cache, which takes five minutes or more on two
// cores for all, and returns each program's path by its name.
func buildAll(ctx context.Context, cache string) (map[string]string, error) {
	paths := map[string]string{}
	for i, p := range programs() {
		path, err := p.path(cache)
		if err != nil {
			return nil, err
		}
		paths[p.name()] = path
		if _, err := os.Stat(path); err == nil {
			continue
		}
		say("building %s (%d of %d)", p.name(), i+1, len(programs()))
		if err := goBuild(ctx, buildModule, p.command(), p.pkg, path, "-trimpath", compileFlags, "-ldflags", "-s -w "+p.ldflags); err != nil {
			return nil, err
		}
	}
	return paths, nil
}

// goBuild builds a static binary, nicely, and says from time to time that it still does.
func goBuild(ctx context.Context, dir string, command []string, pkg, path string, flags ...string) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	half := path + ".half" // a build that is cut short is not mistaken for a program
	args := slices.Concat([]string{"-n", cmp.Or(os.Getenv("E2E_NICE"), "10"), "go"}, command, []string{"-mod=readonly", "-o", half}, flags, []string{pkg})
	cmd := exec.CommandContext(ctx, "nice", args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	defer heartbeat("still building " + filepath.Base(path))()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s in %s: %w\n%s", pkg, dir, err, out)
	}
	return os.Rename(half, path)
}

var began = time.Now()

// say prints a line of progress.
func say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "e2e %6.1fs  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
}

// heartbeat says a line each minute until the returned function is called.
func heartbeat(line string) (stop func()) {
	ticker, done := time.NewTicker(time.Minute), make(chan struct{})
	go func() {
		for {
			select {
			case <-ticker.C:
				say("%s", line)
			case <-done:
				return
			}
		}
	}()
	return func() { ticker.Stop(); close(done) }
}
