package state

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/machine"
)

// smallTmpfs mounts a tmpfs of 512 KiB.
func smallTmpfs(t *testing.T) string {
	t.Helper()
	machine.Kernel(t)
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=512k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// lifeTo makes a volume's record, and end takes all of it back.
func lifeTo(t *testing.T, s *Store, id string) {
	t.Helper()
	mustEdit(t, s, id, staged("/stage/"+id))
	mustEdit(t, s, id, published("/pod/"+id))
}

func end(s *Store, id string) error {
	for _, edit := range []func(*Volume) error{
		func(v *Volume) error { return v.AskUnpublish("/pod/"+id, time.Now()) },
		func(v *Volume) error { v.Drop(TargetPart("/pod/" + id)); return nil },
		func(v *Volume) error { return v.AskUnstage("/stage/"+id, time.Now()) },
		func(v *Volume) error { v.Drop(StagePart()); return nil },
	} {
		if _, err := s.Edit(id, edit); err != nil {
			return err
		}
	}
	return nil
}

// copied returns the records that a process which is killed now would leave.
func copied(t *testing.T, path string) []*Volume {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(t.TempDir(), "intents.db")
	if err := os.WriteFile(other, raw, 0o600); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, other, testBoot)
	defer closeStore(t, s)
	if s.SetAside() != "" {
		t.Error("the store is damaged")
	}
	return s.List()
}

// On a full file system everything that stands can go, durably, and nothing new
// comes; also when the plugin starts there.
func TestRemovalsWithoutSpace(t *testing.T) {
	dir := smallTmpfs(t)
	path := filepath.Join(dir, "intents.db")
	s := openStore(t, path, testBoot)
	const volumes = 40
	for i := range volumes {
		lifeTo(t, s, fmt.Sprint("v", i))
	}
	fill(t, filepath.Join(dir, "fill"))
	mustEdit(t, s, "v0", func(v *Volume) error { v.Accept(StagePart()); return nil }) // what is under way comes to its end
	var err error
	for i := range 1000 {
		if _, err = s.Edit(fmt.Sprint("new", i), staged(fmt.Sprint("/new/", i))); err != nil {
			break
		}
	}
	if ClassOf(err) != ResourceExhausted || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("something new: %v", err)
	}
	closeStore(t, s)
	s = openStore(t, path, testBoot) // as a plugin that starts
	for _, v := range s.List() {
		if len(v.Targets) == 0 {
			mustEdit(t, s, v.ID, emptied)
		}
	}
	var group sync.WaitGroup
	for i := range volumes {
		group.Go(func() {
			if err := end(s, fmt.Sprint("v", i)); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if left := copied(t, path); len(left) > 0 || len(s.List()) > 0 {
		t.Errorf("left: %d in the file, %d in memory", len(left), len(s.List()))
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	lifeTo(t, s, "after")
}

// What can't be written at all goes in memory, and is written when it can be.
func TestRemovalsInMemory(t *testing.T) {
	dir := smallTmpfs(t)
	path := filepath.Join(dir, "intents.db")
	s := openStore(t, path, testBoot)
	for _, id := range []string{"goes", "stays", "later"} {
		lifeTo(t, s, id)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(dir, "fill"))
	if err := end(s, "goes"); err != nil {
		t.Errorf("a removal: %v", err)
	}
	for title, edit := range map[string]func(*Volume) error{
		"acceptance":   func(v *Volume) error { v.Accept(StagePart()); return nil },
		"begin":        func(v *Volume) error { v.Stage.Begun = true; return nil },
		"other target": published("/other"),
		"other stage": func(v *Volume) error {
			v.Stage.Gone, v.Stage.Next, v.Targets = true, &Stage{Path: "/other"}, nil
			return nil
		},
		"both": func(v *Volume) error {
			v.Accept(StagePart())
			return v.AskUnpublish("/pod/stays", time.Now())
		},
	} {
		if v, err := s.Edit("stays", edit); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: %+v, %v", title, v, err)
		}
	}
	if v := s.Get("stays"); s.Get("goes") != nil || v == nil || v.Stage.Accepted || len(v.Targets) != 1 || v.Targets["/pod/stays"].Gone {
		t.Errorf("there are %+v", s.List())
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	mustEdit(t, s, "later", func(v *Volume) error { v.Accept(StagePart()); return nil })
	if left := copied(t, path); len(left) != 2 {
		t.Errorf("written: %+v", left)
	}

	// The end of the process is the last chance.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(dir, "fill"))
	if err := end(s, "later"); err != nil {
		t.Errorf("a removal: %v", err)
	}
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	if left := copied(t, path); len(left) != 1 || left[0].ID != "stays" {
		t.Errorf("written: %+v", left)
	}
}

// A removal that could not be written goes with the next write that can be.
func TestRemovalsAreWrittenLater(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	s := openStore(t, path, testBoot)
	for _, id := range []string{"goes", "stays"} {
		lifeTo(t, s, id)
	}
	if err := s.db.Close(); err != nil { // and with it the file: no write can be
		t.Fatal(err)
	}
	if err := end(s, "goes"); err != nil {
		t.Errorf("a removal: %v", err)
	}
	if v, err := s.Edit("stays", func(v *Volume) error { v.Accept(StagePart()); return nil }); err == nil {
		t.Errorf("accepted in memory: %+v", v)
	}
	if left := copied(t, path); len(left) != 2 {
		t.Errorf("written too early: %+v", left)
	}
	f, _, err := lockFile(t.Context(), path, false)
	if err != nil {
		t.Fatal(err)
	}
	db, err := openDB(f, false)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.take(db, f, testBoot); err != nil {
		t.Fatal(err)
	}
	mustEdit(t, s, "stays", func(v *Volume) error { v.Accept(StagePart()); return nil })
	if left := copied(t, path); len(left) != 1 || left[0].ID != "stays" || !left[0].Stage.Accepted {
		t.Errorf("written: %+v", left)
	}
}
