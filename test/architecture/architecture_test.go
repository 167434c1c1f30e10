// Package architecture holds the code to docs/architecture.md: the imports to its
// drawing, and the packages to its table. Begin with
// TestDrawingShowsTheImports.
package architecture

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/test/require"
)

const (
	module = "github.com/csi-node/csi-node/"
	root   = "../.."
)

// forbidden lists, for each package, packages of others that must not reach it: only
// the edge of the program knows gRPC and its codes, and only pkg/tracing where spans go.
var forbidden = map[string][]string{
	"pkg/state":      {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/mounts":     {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/filesystem": {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/reconciler": {"google.golang.org/grpc", "github.com/container-storage-interface", "go.opentelemetry.io/otel/sdk", "go.opentelemetry.io/otel/exporters"},
	"pkg/driver":     {"go.opentelemetry.io/otel/sdk", "go.opentelemetry.io/otel/exporters"},
	"pkg/nodeserver": {"google.golang.org/grpc/codes", "google.golang.org/grpc/status"},
}

// The folders below pkg/devices that are no backend.
var notBackends = []string{"pkg/devices/devicestest", "pkg/devices/note"}

func TestOnlyTheProgramNamesABackend(t *testing.T) {
	for name, imports := range imports(t) {
		for _, imported := range imports {
			own, _ := strings.CutPrefix(imported, module)
			if strings.HasPrefix(own, "pkg/devices/") && !slices.Contains(notBackends, own) && name != "cmd/csi-node" {
				t.Errorf("%s imports the backend %s: let it ask through an interface of pkg/devices", name, own)
			}
		}
	}
}

func TestStrangersStayAtTheEdge(t *testing.T) {
	all := imports(t)
	for name, strangers := range forbidden {
		if len(all[name]) == 0 {
			t.Errorf("%s is not there, or imports nothing", name)
		}
		for _, imported := range all[name] {
			for _, stranger := range strangers {
				if strings.HasPrefix(imported, stranger) {
					t.Errorf("%s must not import %s", name, imported)
				}
			}
		}
	}
}

func TestDrawingShowsTheImports(t *testing.T) {
	drawn, real := drawing(t), map[string]bool{}
	for name, imports := range imports(t) {
		for _, imported := range imports {
			own, is := strings.CutPrefix(imported, module)
			if !is || undrawn(own) {
				continue
			}
			if undrawn(name) {
				t.Errorf("%s must not import %s: it is below all others", name, own)
			}
			real[name+" --> "+own] = true
		}
	}
	for arrow := range real {
		if !drawn[arrow] {
			t.Errorf("docs/architecture.md lacks the arrow %s", arrow)
		}
	}
	for arrow := range drawn {
		if !real[arrow] {
			t.Errorf("docs/architecture.md has the arrow %s, and there is no such import", arrow)
		}
	}
}

// undrawn says whether every package may import this one, so that the drawing
// leaves it out.
func undrawn(name string) bool {
	return name == "pkg/state" || strings.HasPrefix(name, "pkg/internal/")
}

func TestTableListsThePackages(t *testing.T) {
	_, table, _ := strings.Cut(read(t, "docs/architecture.md"), "\n| package |")
	listed := map[string]bool{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` \\|").FindAllStringSubmatch(table, -1) {
		listed[row[1]] = true
	}
	all := imports(t)
	for name := range all {
		if !listed[name] {
			t.Errorf("the table of docs/architecture.md lacks %s", name)
		}
	}
	for name := range listed {
		if _, is := all[name]; !is {
			t.Errorf("the table of docs/architecture.md has %s, which is not there", name)
		}
	}
}

// drawing reads the arrows of the drawing in docs/architecture.md, each as "a --> b".
func drawing(t *testing.T) map[string]bool {
	_, rest, found := strings.Cut(read(t, "docs/architecture.md"), "```mermaid\nflowchart TD\n")
	picture, _, ended := strings.Cut(rest, "```")
	if !found || !ended {
		t.Fatal("docs/architecture.md has no drawing")
	}
	arrows := map[string]bool{}
	for line := range strings.Lines(picture) {
		from, to, is := strings.Cut(strings.TrimSpace(line), " --> ")
		if !is {
			t.Fatalf("the drawing has a line that is no arrow: %q", line)
		}
		for _, each := range strings.Split(to, " & ") {
			arrows[from+" --> "+each] = true
		}
	}
	return arrows
}

// imports lists the imports of each package of the product by its path in the module.
func imports(t *testing.T) map[string][]string {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", module+"pkg/...", module+"cmd/...", module+"examples/...").Output()
	require.NoError(t, err)
	all := map[string][]string{}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all[strings.TrimPrefix(p.ImportPath, module)] = p.Imports
	}
}

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)
	return string(text)
}
