//go:build vm

package vm

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// TestDemo: what `make demo-vm` runs tells the whole story, and how it ended.
func TestDemo(t *testing.T) {
	image := newImage(t)
	binary := filepath.Join(t.TempDir(), "csi-node")
	build := exec.Command("go", "build", "-o", binary, filepath.Join(root, "cmd/csi-node"))
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var told strings.Builder
	require.NoError(t, Demo(within(t, 10*time.Minute), image, binary, &told))
	if first, last := "\n 1. ", "nothing is left.\n"; !strings.Contains("\n"+told.String(), first) || !strings.HasSuffix(told.String(), last) {
		t.Errorf("the demo tells, not from %q to %q:\n%s", first, last, told.String())
	}
	machine.WriteProgram(t, binary, "#!/bin/sh\necho refused >&2\nexit 3\n")
	told.Reset()
	var failed JobError
	if err := Demo(within(t, 10*time.Minute), image, binary, &told); !errors.As(err, &failed) || failed.Code != 3 || told.String() != "refused\n" {
		t.Errorf("a demo that fails with 3 ended with %v and told %q", err, told.String())
	}
}
