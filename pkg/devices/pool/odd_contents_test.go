package pool

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// within ends the test unless f ends soon.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatalf("%s hangs", what)
	}
}

// What is no file is not opened, and what cannot be the facts of a volume is not read: the others
// are served.
func TestOddContents(t *testing.T) {
	for name, odd := range map[string]func(dir string) error{
		"facts that are a FIFO": func(dir string) error { return unix.Mkfifo(dir+"/volume.json", 0o600) },
		"facts that are a link": func(dir string) error { return os.Symlink("data", dir+"/volume.json") },
		"huge facts": func(dir string) error {
			f, err := os.Create(dir + "/volume.json")
			if err == nil {
				err = f.Truncate(512 << 20)
				f.Close()
			}
			return err
		},
		"data that is a link": func(dir string) error {
			if err := os.Remove(dir + "/data"); err != nil {
				return err
			}
			if err := os.WriteFile(dir+"/elsewhere", nil, 0o600); err != nil {
				return err
			}
			return errors.Join(os.Truncate(dir+"/elsewhere", 1<<40), os.Symlink("elsewhere", dir+"/data"))
		},
		"a link to itself": func(dir string) error {
			if err := os.RemoveAll(dir); err != nil {
				return err
			}
			return os.Symlink("odd", dir)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "pool")
			p, err := Open(dir)
			require.NoError(t, err)
			place := filepath.Join(dir, "volumes/odd")
			require.NoError(t, os.Mkdir(place, 0o700))
			require.NoError(t, os.WriteFile(place+"/data", make([]byte, 4096), 0o600))
			require.NoError(t, odd(place))
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			within(t, "another volume", func() {
				if _, err := p.Create(t.Context(), thin("next", 1<<20, 100)); err != nil {
					t.Errorf("another volume: %v", err)
				}
			})
			if _, err := p.Get(t.Context(), "odd"); err == nil {
				t.Error("it counts as a volume")
			}
			runtime.ReadMemStats(&after)
			if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 64<<20 {
				t.Errorf("%d bytes were allocated", allocated)
			}
		})
	}
}

// Remains that are a FIFO do not stop the start, nor data that is one the deletion.
func TestFIFOs(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pool")
	p, err := Open(dir)
	require.NoError(t, err)
	_, err = p.Create(t.Context(), thin("v", 1<<20, 100))
	require.NoError(t, err)
	data := filepath.Join(dir, "volumes/v/data")
	require.NoError(t, os.Remove(data))
	require.NoError(t, unix.Mkfifo(data, 0o600))
	require.NoError(t, unix.Mkfifo(filepath.Join(dir, "tmp/a"), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "tmp/b"), 0o700))
	within(t, "the start", func() {
		if p, err = Open(dir); err != nil {
			t.Error(err)
			return
		}
		p.sweep(t.Context())
	})
	if left, err := os.ReadDir(filepath.Join(dir, "tmp")); len(left) > 0 || err != nil {
		t.Errorf("left is %v (%v)", left, err)
	}
	within(t, "the deletion", func() { _ = p.Delete(t.Context(), "v") })
}

// A link is followed neither when remains are swept away, nor when a volume grows or is deleted.
func TestLinksAreNotFollowed(t *testing.T) {
	dir, elsewhere := filepath.Join(t.TempDir(), "pool"), t.TempDir()
	p, err := Open(dir)
	require.NoError(t, err)
	for _, id := range []string{"data", "whole"} {
		_, err := p.Create(t.Context(), thin(id, 1<<20, 100))
		require.NoError(t, err)
	}
	moved := func(from, to string) {
		t.Helper()
		require.NoError(t, os.Rename(from, to))
		require.NoError(t, os.Symlink(to, from))
	}
	data, whole := filepath.Join(elsewhere, "data"), filepath.Join(elsewhere, "whole")
	moved(filepath.Join(dir, "volumes/data/data"), data)
	moved(filepath.Join(dir, "volumes/whole"), whole)
	if err := p.Grow(t.Context(), "data", 2<<20); err == nil {
		t.Error("data behind a link grew")
	}
	if info, err := os.Stat(data); err != nil || info.Size() != 1<<20 {
		t.Errorf("behind the link is %v (%v)", info, err)
	}
	require.Words(t, p.Delete(t.Context(), "whole"), "volumes/whole is no directory")
	if _, err := os.Stat(whole + "/data"); err != nil {
		t.Error(err)
	}
	for _, name := range []string{"tmp", "trash"} {
		other := filepath.Join(elsewhere, name)
		moved(filepath.Join(dir, name), other)
		precious := filepath.Join(other, "precious")
		require.NoError(t, os.Mkdir(precious, 0o700))
		_, err := Open(dir)
		require.Words(t, err, name+" is no directory")
		if _, err := os.Stat(precious); err != nil {
			t.Error(err)
		}
		require.NoError(t, os.Remove(filepath.Join(dir, name)))
	}
	moved(filepath.Join(dir, "volumes"), filepath.Join(elsewhere, "volumes")) // of which nothing is removed
	_, err = Open(dir)
	require.NoError(t, err)
}

// A count that is cut short counts nothing as nothing: neither is there room that is not, nor none
// where there is some.
func TestCountThatIsCutShort(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pool")
	p, err := Open(dir)
	require.NoError(t, err)
	inline := func(id string) Volume {
		v := thin(id, 8<<20, 100)
		v.Name, v.Ephemeral = "", &Owner{PodUID: id, Target: "/t/" + id}
		return v
	}
	_, err = p.Create(t.Context(), inline("a"))
	require.NoError(t, err)
	reopened := func() *Pool {
		p, err := Open(dir)
		require.NoError(t, err)
		p.limits.InlineTotal = amount{Bytes: 10 << 20}
		return p
	}
	whole, err := reopened().Capacity(t.Context())
	require.NoError(t, err)
	for asked := range 12 {
		if c, err := reopened().Capacity(&endsAfter{t.Context(), asked}); err == nil && (c.Damaged > 0 || c.Promised != whole.Promised) {
			t.Errorf("after %d: counted are %+v, not %+v", asked, c, whole)
		}
		_, err := reopened().Create(&endsAfter{t.Context(), asked}, inline("b"))
		if class := state.ClassOf(err); err == nil || class != state.ResourceExhausted && class != state.Canceled {
			t.Errorf("after %d: a second inline volume: %v", asked, err)
		}
		require.NoError(t, p.Delete(t.Context(), "b"))
	}
}
