package mounts

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
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

// A process with this in its environment only mounts a tmpfs, 300 directories of 250
// characters below its working directory: mountinfo has a line of more than 64 KiB then.
const mountDeep = "CSI_NODE_TEST_MOUNT_DEEP"

func init() {
	if os.Getenv(mountDeep) == "" {
		return
	}
	dir := strings.Repeat("x", 250)
	for range 300 {
		if err := errors.Join(unix.Mkdir(dir, 0o700), unix.Chdir(dir)); err != nil {
			panic(err)
		}
	}
	if err := errors.Join(unix.Mkdir("m", 0o700), unix.Mount("deep", "m", "tmpfs", 0, "")); err != nil {
		panic(err)
	}
	os.Exit(0)
}

// A mount whose path nobody can name hides none of the others, in this mount namespace.
func TestMountPointOfAnyLength(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, stage, target, below := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target"), filepath.Join(root, "below")
		d, raw := mounted(t, h, stage), newDevice(t, root, "")
		must(t, h.BindDevice(ctx, raw, target))
		mountTmpfs(t, "below", below, 0)
		defer func() { must(t, unix.Unmount(below, unix.MNT_DETACH)) }()
		cmd := exec.Command("/proc/self/exe")
		cmd.Dir, cmd.Env = below, append(os.Environ(), mountDeep+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		wantMount(t, h, stage, d.Number)
		if paths, err := h.BoundAt(ctx, raw.Number); err != nil || !slices.Equal(paths, []string{target}) {
			t.Errorf("bound at %q (%v)", paths, err)
		}
		if paths, err := h.MountedAt(ctx, d.Number); err != nil || !slices.Equal(paths, []string{stage}) {
			t.Errorf("mounted at %q (%v)", paths, err)
		}
		if found := h.Keepers(ctx, d.Number, nil); !slices.Equal(found, []string{"the mount at " + stage}) {
			t.Errorf("keepers %q", found)
		}
	})
}

// Nor does it in another one.
func TestMountPointOfAnyLengthInAnotherNamespace(t *testing.T) {
	h, root := newHost(t)
	ctx, stage, target, below := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target"), filepath.Join(root, "below")
	d, raw := mounted(t, h, stage), newDevice(t, root, "")
	must(t, h.BindDevice(ctx, raw, target))
	must(t, os.Mkdir(below, 0o700))
	self, err := os.Executable()
	must(t, err)
	cmd := start(t, machine.InNamespace("private", root, "mount -t tmpfs below $1 && cd $1 && "+mountDeep+"=1 $2 && cd / && exec "+waiting(t), below, self)...)
	table, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", cmd.Process.Pid))
	must(t, err)
	if !slices.ContainsFunc(strings.Split(string(table), "\n"), func(line string) bool { return len(line) > 64<<10 }) {
		t.Fatal("there is no long line")
	}
	must(t, h.Unmount(ctx, stage))
	must(t, h.Unmount(ctx, target))
	at := func(path string) []string {
		return []string{fmt.Sprintf("pid %d (tail) with a mount at %s in its own mount namespace", cmd.Process.Pid, path)}
	}
	if paths, err := h.BoundAt(ctx, raw.Number); err != nil || !slices.Equal(paths, at(target)) {
		t.Errorf("bound at %q (%v)", paths, err)
	}
	if found := h.Keepers(ctx, d.Number, nil); !slices.Equal(found, at(stage)) {
		t.Errorf("keepers %q", found)
	}
	if found := Holders(ctx, d.Number); !slices.Equal(found, at(stage)) {
		t.Errorf("holders %q", found)
	}
}
