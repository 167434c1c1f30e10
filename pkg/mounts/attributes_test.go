package mounts

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestSetAttributes(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, path := t.Context(), filepath.Join(root, "stage")
		d := mounted(t, h, path)
		for _, step := range []struct {
			flags string
			want  state.Attributes
		}{
			{"ro,noatime", state.ReadOnly | state.NoAtime},
			{"nosuid,nodev,noexec", state.ReadOnly | state.NoAtime | state.NoSuid | state.NoDev | state.NoExec},
			{"strictatime,dev", state.ReadOnly | state.StrictAtime | state.NoSuid | state.NoExec},
			{"", state.ReadOnly | state.StrictAtime | state.NoSuid | state.NoExec},
			{"rw,relatime,suid,exec,nodiratime,nosymfollow", state.NoDirAtime | state.NoSymFollow},
		} {
			flags, err := state.ParseFlags([]string{step.flags})
			must(t, err)
			must(t, h.SetAttributes(ctx, path, flags))
			m := wantMount(t, h, path, d.Number)
			mustBe(t, step.flags, m.Attributes, step.want)
			mustBe(t, "met", flags.Met(m.Attributes), true)
		}
		f, err := os.Create(filepath.Join(path, "file"))
		must(t, err)
		wantClass(t, h.SetAttributes(ctx, path, state.Flags{Set: state.ReadOnly}), state.Unavailable, "in use by", fmt.Sprintf("pid %d ", os.Getpid()))
		must(t, f.Close())
		must(t, h.SetAttributes(ctx, path, state.Flags{Set: state.ReadOnly}))
		must(t, os.Mkdir(filepath.Join(root, "plain"), 0o750))
		wantClass(t, h.SetAttributes(ctx, filepath.Join(root, "plain"), state.Flags{Set: state.ReadOnly}), state.Unavailable, "not a mount point")
	})
}
