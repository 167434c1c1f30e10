package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// fill takes all blocks of a file system, or all inodes; the room comes back with give.
func fill(t *testing.T, dir string, blocks bool) (give func()) {
	t.Helper()
	dir = filepath.Join(dir, "fill")
	must(t, os.MkdirAll(dir, 0o700))
	var err error
	for i := 0; err == nil; i++ {
		var f *os.File
		if f, err = os.Create(filepath.Join(dir, fmt.Sprint(i))); err == nil {
			for blocks && err == nil {
				_, err = f.Write(make([]byte, 4096))
			}
			must(t, f.Close())
		}
	}
	if !isFull(err) {
		t.Fatal(err)
	}
	return func() { must(t, os.RemoveAll(dir)) }
}

// lifeTo makes a volume's record, and end takes all of it back.
func lifeTo(t *testing.T, s *Store, id string) {
	t.Helper()
	mustEdit(t, s, id, staged("/stage/"+id))
	mustEdit(t, s, id, published("/pod/"+id))
}

func end(s *Store, id string) error {
	for _, edit := range []func(*state.Volume) error{
		askedAt("unpublish", "/pod/"+id),
		func(v *state.Volume) error { v.Drop(state.TargetPart("/pod/" + id)); return nil },
		askedAt("unstage", "/stage/"+id),
		func(v *state.Volume) error { v.Drop(state.StagePart()); return nil },
	} {
		if _, err := s.Edit(id, edit); err != nil {
			return err
		}
	}
	return nil
}

// left names the records that a process which is killed now would leave.
func left(t *testing.T, dir string) string {
	t.Helper()
	c, err := read(filepath.Join(dir, Directory), testBoot)
	must(t, err)
	s := newStore(dir, testBoot)
	s.take(c.records)
	if len(c.bad) > 0 {
		t.Errorf("damaged: %v", c.bad)
	}
	return idsOf(s)
}

// On a full file system everything that stands can go, durably, facts can be
// noted, and nothing new comes; also when the plugin starts there.
func TestFullFileSystem(t *testing.T) {
	const volumes = 40
	for _, blocks := range []bool{true, false} {
		dir := mountAt(t, "tmpfs", "size=512k,nr_inodes=100")
		s := openStore(t, dir, testBoot)
		for i := range volumes {
			lifeTo(t, s, fmt.Sprint("v", i))
		}
		give := fill(t, dir, blocks)
		refused := func(id string) {
			t.Helper()
			if _, err := s.Edit(id, staged("/new")); state.ClassOf(err) != state.ResourceExhausted || !errors.Is(err, syscall.ENOSPC) || s.Get(id) != nil {
				t.Errorf("something new: %v", err)
			}
		}
		refused("new")
		closeStore(t, s)
		s = openStore(t, dir, testBoot) // as a plugin that starts
		refused("new")
		var group sync.WaitGroup
		for i := range volumes {
			group.Go(func() {
				id := fmt.Sprint("v", i)
				_, err := s.Edit(id, accepted) // what is under way comes to its end
				if err = errors.Join(err, end(s, id)); err != nil {
					t.Error(err)
				}
				if raw, err := os.ReadFile(fileOf(dir, id)); !os.IsNotExist(err) {
					t.Errorf("left: %s (%v)", raw, err)
				}
			})
		}
		group.Wait()
		if left(t, dir) != "" || idsOf(s) != "" || len(s.unwritten) > 0 {
			t.Errorf("left: %s in the directory, %s in memory, unwritten %v", left(t, dir), idsOf(s), s.unwritten)
		}
		give()
		lifeTo(t, s, "after")
		must(t, os.RemoveAll(filepath.Join(dir, Directory)))
		give = fill(t, dir, true) // and without a directory for what goes
		if err := end(s, "after"); err != nil || idsOf(s) != "" {
			t.Errorf("a removal: %v", err)
		}
		refused("new")
		give()
		mustEdit(t, s, "v", staged("/v"))
		s.dir.short = true
		must(t, os.Remove(filepath.Join(s.path, spareName)))
		give = fill(t, dir, true)
		filler, err := os.Stat(filepath.Join(dir, "fill", "0"))
		must(t, err)
		must(t, os.Truncate(filepath.Join(dir, "fill", "0"), filler.Size()-spareBytes/2)) // there is some room, and none to spare
		for range 2 {
			refused("new")
		}
		give()
	}
	dir := mountAt(t, "tmpfs", "size=512k")
	must(t, syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=512k"))
	if s, err := Open(t.Context(), dir, testBoot); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a read-only file system: %v, %v", s, err)
	}
}

// What can't be written at all goes in memory, and is written when it can be,
// with the next write or at the end.
func TestRemovalsInMemory(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	for _, id := range []string{"goes", "stays", "later"} {
		lifeTo(t, s, id)
	}
	inTheWay := func(id string) string { return fileOf(dir, id) + freshSuffix }
	for _, id := range []string{"goes", "stays"} {
		must(t, os.MkdirAll(filepath.Join(inTheWay(id), "in"), 0o700))
	}
	for title, edit := range map[string]func(*state.Volume) error{
		"acceptance":   accepted,
		"begin":        func(v *state.Volume) error { v.Stage.Begun = true; return nil },
		"other target": published("/other"),
		"other stage": func(v *state.Volume) error {
			v.Stage.Gone, v.Stage.Next, v.Targets = true, &state.Stage{Path: "/other"}, nil
			return nil
		},
		"both": func(v *state.Volume) error {
			v.Accept(state.StagePart())
			return v.AskUnpublish("/pod/stays", time.Now())
		},
	} {
		if v, err := s.Edit("stays", edit); !errors.Is(err, syscall.EISDIR) || state.ClassOf(err) != state.Unavailable {
			t.Errorf("%s: %+v, %v", title, v, err)
		}
	}
	mustEdit(t, s, "goes", askedAt("unpublish", "/pod/goes"))
	if v, w := s.Get("stays"), s.Get("goes"); v.Stage.Accepted || len(v.Targets) != 1 || v.Targets["/pod/stays"].Gone || !w.Targets["/pod/goes"].Gone {
		t.Errorf("there are %+v", s.List())
	}
	if raw, err := os.ReadFile(fileOf(dir, "goes")); err != nil || strings.Contains(string(raw), "gone") {
		t.Errorf("written too early: %s (%v)", raw, err)
	}
	written := func(id string) {
		t.Helper()
		if raw, err := os.ReadFile(fileOf(dir, id)); err != nil || !strings.Contains(string(raw), `"gone":true`) {
			t.Errorf("not written: %s (%v)", raw, err)
		}
	}
	must(t, os.RemoveAll(inTheWay("goes")))
	mustEdit(t, s, "later", accepted)
	written("goes")
	s.later.Stop()
	mustEdit(t, s, "stays", askedAt("unpublish", "/pod/stays"))
	tried := s.later.Stop()
	s.rewriteLater()
	if !tried || !s.later.Stop() {
		t.Error("it would not be tried again by itself")
	}
	must(t, os.RemoveAll(inTheWay("stays")))
	closeStore(t, s)
	written("stays")
}

// Whatever becomes of the files while the plugin runs, nothing is forgotten.
func TestFilesLostWhileOpen(t *testing.T) {
	for name, harm := range map[string]func(dir string) error{
		"a file":    func(dir string) error { return os.Remove(fileOf(dir, "b")) },
		"all files": func(dir string) error { return os.RemoveAll(filepath.Join(dir, Directory)) },
		"all moved": func(dir string) error {
			return os.Rename(filepath.Join(dir, Directory), dir+".moved-"+fmt.Sprint(time.Now().UnixNano()))
		},
		"state directory": os.RemoveAll,
		"damaged":         func(dir string) error { return os.WriteFile(fileOf(dir, "b"), []byte("garbage"), 0o600) },
		"replaced": func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, Directory)), os.MkdirAll(fileOf(dir, "c"), 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			s := openStore(t, dir, testBoot)
			mustEdit(t, s, "a", staged("/stage/a"))
			for range 2 {
				mustEdit(t, s, "gone", staged("/stage/gone"))
				mustEdit(t, s, "b", staged("/stage/b"))
				must(t, harm(dir))
				var group sync.WaitGroup
				for _, id := range []string{"c", "d", "e"} {
					group.Go(func() { mustEdit(t, s, id, staged("/stage/"+id)) })
				}
				mustEdit(t, s, "gone", emptied)
				mustEdit(t, s, "b", func(v *state.Volume) error { v.Stage.Accepted = !v.Stage.Accepted; return nil })
				group.Wait()
				mustEdit(t, s, "e", emptied)
			}
			crash(t, s)
			if again := openStore(t, dir, testBoot); idsOf(again) != "a b c d" || len(again.SetAside()) > 0 {
				t.Errorf("after it was opened again there are the records %s, set aside %q", idsOf(again), again.SetAside())
			}
			if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 2 {
				t.Errorf("left %q (%v)", names, err)
			}
		})
	}
}

// Two plugins on one state directory: the one whose files were deleted does not
// take the other's.
func TestFilesLostToAnother(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "a", staged("/stage/a"))
	must(t, os.RemoveAll(filepath.Join(dir, Directory)))
	must(t, os.Remove(legacyPath(dir)))
	other := openStore(t, dir, testBoot)
	mustEdit(t, other, "x", staged("/stage/x"))
	if _, err := s.Edit("b", staged("/stage/b")); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("edited: %v", err)
	}
	if idsOf(s) != "a" || idsOf(other) != "x" || left(t, dir) != "x" {
		t.Errorf("records were mixed up: %s, %s, %s", idsOf(s), idsOf(other), left(t, dir))
	}
}
