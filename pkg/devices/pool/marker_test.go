package pool

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestOpenMakesAPoolOfAnEmptyDirectory(t *testing.T) {
	for name, prepare := range map[string]func(dir string){
		"missing":            func(string) {},
		"missing parents":    func(dir string) { ok(t, os.RemoveAll(filepath.Dir(dir))) },
		"empty":              func(dir string) { ok(t, os.MkdirAll(dir, 0o700)) },
		"lost+found":         func(dir string) { ok(t, os.MkdirAll(filepath.Join(dir, "lost+found"), 0o700)) },
		"interrupted before": func(dir string) { write(t, filepath.Join(dir, markerFile+".new"), "{") },
	} {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			prepare(dir)
			p := open(t, dir)
			if len(p.uuid) != 36 || open(t, dir+"/").uuid != p.uuid {
				t.Errorf("UUID %q, then %q", p.uuid, open(t, dir).uuid)
			}
			ok(t, p.Check(t.Context()))
			if other := open(t, newDir(t)); other.uuid == p.uuid {
				t.Error("two pools have one UUID")
			}
		})
	}
}

// TestOpenTakesUpAPool that was initialised up to a crash, or whose disk came
// from another node.
func TestOpenTakesUpAPool(t *testing.T) {
	dir := newDir(t)
	p := open(t, dir)
	create(t, p, "v", mib, Thin)
	ok(t, os.Remove(dir+seenSuffix))
	if again := open(t, dir); again.uuid != p.uuid {
		t.Errorf("UUID %s, before %s", again.uuid, p.uuid)
	}
	if _, err := os.Stat(dir + seenSuffix); err != nil {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	for name, test := range map[string]struct {
		prepare func(dir string)
		words   []string
	}{
		"files of others":   {func(dir string) { write(t, filepath.Join(dir, "precious"), "") }, []string{"precious"}},
		"hidden files":      {func(dir string) { write(t, filepath.Join(dir, ".cache"), "") }, []string{".cache"}},
		"lost marker":       {func(dir string) { open(t, dir); ok(t, os.Remove(filepath.Join(dir, markerFile))) }, []string{"mount it", seenSuffix}},
		"lost directory":    {func(dir string) { open(t, dir); ok(t, os.RemoveAll(dir)) }, []string{"mount it", seenSuffix}},
		"another pool":      {func(dir string) { open(t, dir); write(t, dir+seenSuffix, "u-u-i-d\n") }, []string{"u-u-i-d", "right disk"}},
		"damaged marker":    {func(dir string) { open(t, dir); write(t, filepath.Join(dir, markerFile), "\x00\x00") }, []string{markerFile, "damaged"}},
		"empty marker":      {func(dir string) { open(t, dir); write(t, filepath.Join(dir, markerFile), "{}") }, []string{markerFile, "damaged"}},
		"empty seen file":   {func(dir string) { open(t, dir); write(t, dir+seenSuffix, "") }, []string{seenSuffix, "empty"}},
		"a file":            {func(dir string) { write(t, dir, "") }, []string{"not a directory"}},
		"seen and new disk": {func(dir string) { write(t, dir+seenSuffix, "u-u-i-d\n"); ok(t, os.Mkdir(dir, 0o700)) }, []string{"u-u-i-d", "mount it"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := newDir(t)
			test.prepare(dir)
			_, err := Open(dir)
			wantError(t, err, state.Unavailable, append(test.words, dir)...)
			if name != "a file" && name != "lost directory" {
				if entries, err := os.ReadDir(dir); err != nil || name == "seen and new disk" && len(entries) > 0 {
					t.Errorf("the refused directory holds %v, %v", entries, err)
				}
			}
		})
	}
	for _, dir := range []string{"", "/", "pool", "./pool", "//"} {
		if _, err := Open(dir); err == nil {
			t.Errorf("Open(%q) made a pool", dir)
		}
	}
}

// TestUnmountedPool: what looks like an empty pool is one whose disk is away.
func TestUnmountedPool(t *testing.T) {
	dir := newDir(t)
	unmount := mountTmpfs(t, dir, 16*mib)
	p := open(t, dir)
	create(t, p, "v", mib, Thin)
	unmount()

	if _, err := Open(dir); err == nil {
		t.Error("a fresh pool on the disk beneath")
	}
	check := func(err error) {
		t.Helper()
		wantError(t, err, state.Unavailable, "mount it", p.uuid)
	}
	check(p.Check(t.Context()))
	_, err := p.Get(t.Context(), "v")
	check(err)
	_, err = p.IDs(t.Context())
	check(err)
	_, err = p.Create(t.Context(), volume("w", mib, Thin))
	check(err)
	_, err = p.Capacity(t.Context())
	check(err)
	check(p.Delete(t.Context(), "v"))
	check(p.Grow(t.Context(), "v", 2*mib))
	check(p.BeginFormat(t.Context(), "v"))
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("made on the disk beneath: %v, %v", entries, err)
	}
}
