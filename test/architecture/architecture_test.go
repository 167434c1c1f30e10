// Package architecture keeps the direction of imports: an arrow only ever
// points down, as drawn in docs/architecture.md.
package architecture

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/csi-node/csi-node/"

// below lists, for each package, the packages of this module that it may import.
var below = map[string][]string{
	"pkg/client":              {},
	"pkg/process":             {},
	"pkg/state":               {},
	"pkg/internal/boot":       {},
	"pkg/internal/rawfile":    {},
	"pkg/state/store":         {"pkg/internal/boot", "pkg/internal/keylock", "pkg/process", "pkg/state"},
	"pkg/internal/btrfs":      {"pkg/state"},
	"pkg/mounts":              {"pkg/internal/btrfs", "pkg/state"},
	"pkg/filesystem":          {"pkg/internal/btrfs", "pkg/internal/rawfile", "pkg/state"},
	"pkg/pods":                {},
	"pkg/uevents":             {"pkg/state"},
	"pkg/internal/keylock":    {},
	"pkg/internal/lease":      {"pkg/state"},
	"pkg/internal/devnode":    {"pkg/internal/rawfile", "pkg/state"},
	"pkg/loop":                {"pkg/internal/devnode", "pkg/internal/keylock", "pkg/internal/lease", "pkg/internal/rawfile", "pkg/state"},
	"pkg/blockdev":            {"pkg/internal/devnode", "pkg/internal/keylock", "pkg/loop", "pkg/state"},
	"pkg/devices":             {"pkg/loop", "pkg/state"},
	"pkg/devices/devicestest": {"pkg/devices", "pkg/state"},
	"pkg/devices/pool":        {"pkg/blockdev", "pkg/devices", "pkg/internal/keylock", "pkg/internal/lease", "pkg/internal/rawfile", "pkg/loop", "pkg/state"},
	"pkg/devices/note":        {"pkg/blockdev", "pkg/devices", "pkg/internal/boot", "pkg/internal/keylock", "pkg/state"},
	"pkg/devices/disk":        {"pkg/blockdev", "pkg/devices", "pkg/internal/boot", "pkg/internal/keylock", "pkg/devices/note", "pkg/state"},
	"pkg/reconciler":          {"pkg/devices", "pkg/state"},
	"pkg/registration":        {},
	"pkg/nodeserver":          {"pkg/devices", "pkg/reconciler", "pkg/state"},
	"pkg/controllerserver":    {"pkg/devices", "pkg/state"},
	"pkg/command":             {"pkg/client"},
	"pkg/driver": {"pkg/blockdev", "pkg/client", "pkg/command", "pkg/controllerserver", "pkg/devices", "pkg/devices/note", "pkg/filesystem",
		"pkg/internal/boot", "pkg/loop", "pkg/mounts", "pkg/nodeserver", "pkg/pods", "pkg/process", "pkg/reconciler", "pkg/registration", "pkg/state", "pkg/state/store", "pkg/uevents"},
	"pkg/driver/faults":     {},
	"pkg/driver/drivertest": {"pkg/driver", "pkg/driver/faults", "test/harness"},
	"cmd/csi-node":          {"pkg/client", "pkg/command", "pkg/devices", "pkg/devices/disk", "pkg/devices/pool", "pkg/driver"},
	"examples/acme":         {"pkg/devices", "pkg/driver", "pkg/loop", "pkg/state"},
}

// strangers lists packages of others that must not reach a package.
var strangers = map[string][]string{
	"pkg/state":      {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/mounts":     {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/filesystem": {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/reconciler": {"google.golang.org/grpc", "github.com/container-storage-interface"},
	"pkg/nodeserver": {"google.golang.org/grpc/codes", "google.golang.org/grpc/status"},
}

// backends are the kinds of storage. Nobody else knows one but the program that
// lists them.
var backends = map[string][]string{
	"pkg/devices/disk": {"cmd/csi-node"},
	"pkg/devices/pool": {"cmd/csi-node"},
}

// A backend is one folder behind one interface: who may import it says backends,
// whatever stands in below.
func TestNobodyKnowsABackend(t *testing.T) {
	for name, imports := range below {
		for _, imported := range imports {
			if by, is := backends[imported]; is && !slices.Contains(by, name) {
				t.Errorf("%s knows the backend %s: let it ask through an interface of pkg/devices", name, imported)
			}
		}
	}
	for name := range below {
		rest, found := strings.CutPrefix(name, "pkg/devices/")
		if _, listed := backends[name]; found && !listed && !strings.Contains(rest, "/") && rest != "devicestest" && rest != "note" {
			t.Errorf("%s has no place in the list of backends", name)
		}
	}
}

func TestImportsPointDown(t *testing.T) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports", module+"pkg/...", module+"cmd/...", module+"examples/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := 0
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; seen++ {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, module)
		allowed, known := below[name]
		if !known {
			t.Errorf("%s has no place in the architecture: give it one in this test and in docs/architecture.md", name)
		}
		for _, imported := range p.Imports {
			if own, ok := strings.CutPrefix(imported, module); ok && !slices.Contains(allowed, own) {
				t.Errorf("%s must not import %s", name, own)
			}
			for _, stranger := range strangers[name] {
				if strings.HasPrefix(imported, stranger) {
					t.Errorf("%s must not import %s", name, imported)
				}
			}
		}
	}
	if seen != len(below) {
		t.Errorf("walked %d packages, the architecture has %d", seen, len(below))
	}
}
