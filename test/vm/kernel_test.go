//go:build vm

package vm

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

const root = "../.."

// guest is a machine, and the tests that run in it, all of those of its packages or those
// of a pattern (go test -run).
type guest struct {
	name     string
	module   string // the directory of the packages' module; empty: the repository's root
	packages []string
	run      string
	files    []string // of the repository, which the tests read
	kernel   string   // more of its command line
}

// guests have the tests that meet the kernel, the longest first, as some of them run side by
// side. The rest of the packages are left out: they are pure, or speak to fakes.
var guests = []guest{
	{name: "packages", packages: []string{"pkg/state/store", "pkg/mounts", "pkg/filesystem", "pkg/loop", "pkg/blockdev", "pkg/devices/pool",
		"pkg/devices/disk", "pkg/devices/luks", "pkg/devices/note", "pkg/controllerserver", "pkg/driver", "examples/nfs", "test/sanity"}},
	{name: "lvm", packages: []string{"pkg/devices/lvm"}},
	{name: "node-A-M", packages: []string{"test/node"}, run: "^Test[A-M]", files: []string{"docs/lvm.md", "docs/operate.md", "deploy/overlays/lvm/values.yaml"}},
	{name: "node-N-Z", packages: []string{"test/node"}, run: "^Test[^A-M]"},
	{name: "selinux", packages: []string{"test/selinux"}, kernel: "security=selinux selinux=1"},
	{name: "alerts", module: "test/deploy", packages: []string{"."}, run: "^Test(AlertsOfLVM|DashboardOfThinPools)$", files: []string{"deploy/chart/files/rules.yaml", "deploy/chart/files/dashboard.json"}},
}

// Flags is the environment variable of flags for the guests' test programs, with blanks
// between them, such as "-test.run TestGrow" or "-test.run - -test.bench .".
const Flags = "CSI_NODE_VM_FLAGS"

func TestOtherKernel(t *testing.T) {
	t.Parallel()
	image := newImage(t)
	binaries := t.TempDir()
	require.NoError(t, harness.BuildAll(binaries))
	var failures failures
	t.Cleanup(func() { // after all guests: the end of the output says what failed
		for _, line := range failures.lines {
			t.Log(line)
		}
	})
	for _, g := range guests {
		t.Run(g.name, func(t *testing.T) {
			t.Parallel()
			job := t.TempDir()
			link(t, binaries, filepath.Join(job, "bin"))
			compile(t, job, g.module, g.packages)
			copyProgram(t, "run-tests", filepath.Join(job, "run"))
			var order []string
			for _, p := range g.packages {
				order = append(order, path.Join(g.module, p))
			}
			for _, name := range g.files {
				file := filepath.Join(job, "src", name)
				require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
				text, err := os.ReadFile(filepath.Join(root, name))
				require.NoError(t, err)
				write(t, file, string(text))
			}
			write(t, filepath.Join(job, "order"), strings.Join(order, "\n")+"\n")
			write(t, filepath.Join(job, "flags"), strings.TrimSpace("-test.run="+g.run+" "+os.Getenv(Flags))+"\n")
			scratch := newDisk(t, "scratch", 20<<30)
			var before []string
			machine := Guest{Image: image, Job: job, Disks: []Disk{scratch}, Kernel: g.kernel, Line: func(line string) bool {
				t.Log(line)
				before = failures.look(g.name, before, line)
				return false
			}}
			if err := machine.Run(within(t, 45*time.Minute)); err != nil {
				t.Error(err)
			}
		})
	}
}

// failures are what the guests told of tests that failed.
type failures struct {
	mu    sync.Mutex
	lines []string
}

var failed = regexp.MustCompile(`--- FAIL: |^(panic: |fatal error: |running tests:|WARNING: DATA RACE|FAIL )`)

// look looks at a line of a guest, given the few lines before it, and returns those before
// the next one.
func (f *failures) look(guest string, before []string, line string) []string {
	before = append(before[max(0, len(before)-9):len(before):len(before)], line)
	if !failed.MatchString(line) {
		return before
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, line := range before {
		f.lines = append(f.lines, guest+": "+line)
	}
	return nil
}

// compile makes the test programs of packages of a module, named <last element>.test.
func compile(t *testing.T, dir, module string, packages []string) {
	t.Helper()
	args := []string{"test", "-c", "-tags", "vm", "-ldflags", "-s -w", "-o", dir + "/"}
	for _, p := range packages {
		args = append(args, "./"+p)
	}
	cmd := exec.Command("go", args...)
	cmd.Dir, cmd.Env = filepath.Join(root, module), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("compiling the tests: %v\n%s", err, out)
	}
}

// newImage returns the guest's image.
func newImage(t *testing.T) string {
	t.Helper()
	image, err := Image(within(t, 10*time.Minute), ".")
	require.NoError(t, err)
	return image
}

// newDisk makes an empty disk of so many bytes.
func newDisk(t *testing.T, serial string, bytes int64) Disk {
	t.Helper()
	d := Disk{Serial: serial, Path: filepath.Join(t.TempDir(), serial+".raw")}
	write(t, d.Path, "")
	require.NoError(t, os.Truncate(d.Path, bytes))
	return d
}

// within returns a context for one part of the test.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

func write(t *testing.T, path, text string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o644))
}

func copyProgram(t *testing.T, from, to string) {
	t.Helper()
	text, err := os.ReadFile(from)
	if err == nil {
		err = os.WriteFile(to, text, 0o755)
	}
	require.NoError(t, err)
}

// link makes hard links of a directory's files in a new one.
func link(t *testing.T, from, to string) {
	t.Helper()
	files, err := os.ReadDir(from)
	if err == nil {
		err = os.Mkdir(to, 0o755)
	}
	for _, f := range files {
		err = errors.Join(err, os.Link(filepath.Join(from, f.Name()), filepath.Join(to, f.Name())))
	}
	require.NoError(t, err)
}
