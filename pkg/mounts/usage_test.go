package mounts

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func TestUsage(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d := mounted(t, h, path)
	m, before, err := h.Usage(ctx, path)
	must(t, err)
	if !m.Is(d.Number) || m.FSType != "ext4" || m.Node {
		t.Errorf("the mount is %+v", m)
	}
	for what, a := range map[string]state.Amount{"bytes": before.Bytes, "inodes": before.Inodes} {
		if a.Total <= 0 || a.Total > d.Size || a.Used <= 0 || a.Available <= 0 || a.Used+a.Available > a.Total {
			t.Errorf("%s: %+v", what, a)
		}
	}
	f, err := os.Create(filepath.Join(path, "file"))
	must(t, err)
	_, err = f.Write(make([]byte, 1<<20))
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	_, after, err := h.Usage(ctx, path)
	must(t, err)
	mustBe(t, "inodes", after.Inodes.Used, before.Inodes.Used+1)
	if grown := after.Bytes.Used - before.Bytes.Used; grown < 1<<20 || grown > 1<<20+64<<10 {
		t.Errorf("a file of 1 MiB took %d bytes", grown)
	}
	_, _, err = h.Usage(ctx, filepath.Join(root, "none"))
	wantClass(t, err, state.NotFound)
	_, _, err = h.Usage(ctx, filepath.Join(root, "none/none"))
	wantClass(t, err, state.NotFound)
	_, _, err = h.Usage(ctx, root)
	wantClass(t, err, state.InvalidArgument)
	must(t, h.Unmount(ctx, path)) // no descriptor stayed
	_, _, err = h.Usage(ctx, path)
	wantClass(t, err, state.NotFound, "nothing is mounted")
	must(t, os.Remove(path))
	must(t, h.BindDevice(ctx, d, path))
	if m, usage, err := h.Usage(ctx, path); err != nil || !m.Node || !m.Is(d.Number) || usage != (state.Usage{}) {
		t.Errorf("of a device node: %+v, %+v, %v", m, usage, err)
	}
}

// What a mount on a directory above hides is not taken for gone.
func TestUsageOfWhatIsHidden(t *testing.T) {
	h, root := newHost(t)
	above, hidden := filepath.Join(root, "above"), filepath.Join(root, "above/hidden")
	must(t, os.MkdirAll(hidden, 0o750))
	mountTmpfs(t, "hidden", hidden, 0)
	mountTmpfs(t, "theirs", above, 0)
	for range 2 {
		_, _, err := h.Usage(t.Context(), hidden)
		wantClass(t, err, state.Unavailable, hidden, "hidden by theirs (tmpfs)", "mounted at "+above)
		_, _, err = h.Usage(t.Context(), filepath.Join(above, "other"))
		wantClass(t, err, state.NotFound)
		must(t, os.MkdirAll(hidden, 0o750)) // the directory is not the one that was mounted on
	}
	must(t, machine.Unmount(above))
	if m, _, err := h.Usage(t.Context(), hidden); err != nil || m.Source != "hidden" {
		t.Errorf("uncovered it is %+v (%v)", m, err)
	}
}

// mkfs.ext4 keeps some blocks for root, unless it is told otherwise.
func TestUsageLeavesOutWhatIsRoots(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	mounted(t, h, path)
	_, u, err := h.Usage(t.Context(), path)
	must(t, err)
	if free := u.Bytes.Total - u.Bytes.Used; u.Bytes.Available >= free {
		t.Errorf("%d bytes are available, of %d free", u.Bytes.Available, free)
	}
}

func TestBtrfsUsage(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	d := mountedAs(t, h, path, "btrfs")
	_, usage, err := h.Usage(t.Context(), path)
	must(t, err)
	if b := usage.Bytes; b.Total != d.Size || b.Used <= 0 || b.Available <= 0 || b.Used+b.Available > b.Total || usage.Inodes != (state.Amount{}) {
		t.Errorf("%+v", usage)
	}
}

func TestUsageThatCannotBe(t *testing.T) {
	good := unix.Statfs_t{Frsize: 4096, Blocks: 10, Bfree: 7, Bavail: 5, Files: 6, Ffree: 2}
	for title, test := range map[string]struct {
		change func(*unix.Statfs_t)
		want   state.Usage
	}{
		"good":                  {func(*unix.Statfs_t) {}, state.Usage{Bytes: state.Amount{Total: 40960, Used: 12288, Available: 20480}, Inodes: state.Amount{Total: 6, Used: 4, Available: 2}}},
		"more free than blocks": {func(st *unix.Statfs_t) { st.Bfree = 11 }, state.Usage{}},
		"more for others":       {func(st *unix.Statfs_t) { st.Bavail = 1 << 63 }, state.Usage{}},
		"too large":             {func(st *unix.Statfs_t) { st.Blocks = 1 << 52 }, state.Usage{}},
		"inodes without number": {func(st *unix.Statfs_t) { st.Files, st.Ffree = 6, 1<<64-1 }, state.Usage{Bytes: state.Amount{Total: 40960, Used: 12288, Available: 20480}}},
	} {
		st := good
		test.change(&st)
		usage, err := usageOf(st)
		if usage != test.want || (err != nil) != (usage == state.Usage{}) || err != nil && state.ClassOf(err) != state.Unavailable {
			t.Errorf("%s: %+v, %v", title, usage, err)
		}
	}
}
