package mounts

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/pkg/internal/hang"
)

// The mount that a path lies in is told, be it that the path is not there yet.
func TestAbove(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		in := filepath.Join(root, "in")
		mountTmpfs(t, "in", in, 0)
		must(t, os.MkdirAll(filepath.Join(in, "directory"), 0o700))
		for _, file := range []string{"file", "in/file"} {
			must(t, os.WriteFile(filepath.Join(root, file), nil, 0o600))
		}
		for path, want := range map[string]string{
			"in": "", "in/x": in, "in/directory/x": in, "in/not/yet/there": in, "in/file": in, "x": "", "not/yet/there": "", "file": "",
		} {
			m, point, err := h.Above(filepath.Join(root, path))
			if err != nil || point != want || want != "" && m.Source != "in" {
				t.Errorf("%s: %q, %+v (%v), want %q", path, point, m, err, want)
			}
			seen, err := h.Look(t.Context(), filepath.Join(root, path), hang.NoLimit)
			if err != nil || len(seen.Mounts) == 0 && seen.Apart != (want == "") {
				t.Errorf("%s: %+v (%v), and the mount above is at %q", path, seen, err, want)
			}
		}
	})
}
