package mounts

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestHoldersIsBounded(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	d := mounted(t, h, path)
	for i := range process.NameLimit + 4 {
		must(t, h.BindMount(t.Context(), path, d.Number, filepath.Join(root, fmt.Sprint(i)), state.Flags{}))
	}
	mustBe(t, "names", len(Holders(t.Context(), d.Number)), process.NameLimit)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	mustBe(t, "names once ctx has ended", len(Holders(ctx, d.Number)), 0)
}

// What lies below a path keeps it busy.
func TestKeepersBelow(t *testing.T) {
	h, root := newHost(t)
	stage := filepath.Join(root, "stage")
	d := mounted(t, h, stage)
	below := filepath.Join(stage, "below")
	mountTmpfs(t, "below", below, 0)
	if found := h.Keepers(t.Context(), d.Number, []string{stage}); !slices.Contains(found, "the mount at "+below) {
		t.Errorf("keepers %q", found)
	}
}
