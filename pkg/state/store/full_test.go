package store

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
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

// inUse makes the record of a volume with a stage and a target.
func inUse(t *testing.T, s *Store, id string) {
	t.Helper()
	mustEdit(t, s, id, staged("/stage/"+id))
	mustEdit(t, s, id, published("/pod/"+id))
}

// end takes back all that a record asks for: first each part is asked to go, then
// it is gone.
func end(s *Store, id string) (err error) {
	v := s.Get(id)
	for _, part := range v.Parts() {
		ask := askedAt("unpublish", part.Path)
		if part == state.StagePart() {
			ask = askedAt("unstage", v.Stage.Path)
		}
		_, failed := s.Edit(id, ask)
		err = errors.Join(err, failed)
	}
	for _, part := range v.Parts() {
		_, failed := s.Edit(id, func(v *state.Volume) error { v.Drop(part); return nil })
		err = errors.Join(err, failed)
	}
	return err
}

// left names the records that a process which is killed now would leave.
func left(t *testing.T, dir string) string {
	t.Helper()
	s := newStore(dir, testBoot)
	c, err := read(s.path, testBoot)
	must(t, err)
	s.serve(c.records)
	if len(c.bad) > 0 {
		t.Errorf("damaged: %v", c.bad)
	}
	return idsOf(s)
}

// refused edits ask for something new, of which nothing comes on a full file system.
func refused(t *testing.T, s *Store, edits map[string]func(*state.Volume) error) {
	t.Helper()
	for id, edit := range edits {
		before := s.Get(id)
		_, err := s.Edit(id, edit)
		if state.ClassOf(err) != state.ResourceExhausted || !errors.Is(err, syscall.ENOSPC) || text(s.Get(id)) != text(before) {
			t.Errorf("volume %s: %v, and there is %+v", id, err, s.Get(id))
		}
		if c, err := read(s.path, testBoot); err == nil && text(c.records[id]) != text(before) {
			t.Errorf("volume %s: a crash would leave %+v", id, c.records[id])
		}
	}
}

// On a full file system everything that stands can go, durably, facts can be
// noted, and nothing new comes; also when the plugin starts there, or takes the
// store over.
func TestFullFileSystem(t *testing.T) {
	const volumes = 40
	for _, blocks := range []bool{true, false} {
		dir := mountAt(t, "tmpfs", "size=512k,nr_inodes=100")
		s := openStore(t, dir, testBoot)
		for i := range volumes {
			inUse(t, s, fmt.Sprint("v", i))
		}
		give := fill(t, dir, blocks)
		news := map[string]func(*state.Volume) error{"new": staged("/new")}
		filler := filepath.Join(dir, "fill", "0")
		if blocks { // there is room for one file of a new record, or for one block more of a record that takes two
			news["v0"] = published("/" + strings.Repeat("long/", 250))
			info, err := os.Stat(filler)
			must(t, err)
			must(t, os.Truncate(filler, info.Size()-4096))
		} else {
			must(t, os.Remove(filler))
		}
		refused(t, s, news)
		s = reopen(t, s, testBoot) // as a plugin that starts
		refused(t, s, news)
		var group sync.WaitGroup
		for i := range volumes {
			group.Go(func() {
				id := fmt.Sprint("v", i)
				_, err := s.Edit(id, toggled) // what is under way comes to its end
				if err = errors.Join(err, end(s, id)); err != nil {
					t.Error(err)
				}
				if files, err := filepath.Glob(fileOf(dir, id) + "*"); err != nil || len(files) > 0 {
					t.Errorf("left: %s (%v)", files, err)
				}
			})
		}
		group.Wait()
		if left(t, dir) != "" || idsOf(s) != "" {
			t.Errorf("left: %s in the directory, %s in memory", left(t, dir), idsOf(s))
		}
		give()
		inUse(t, s, "after")
	}
	dir := mountAt(t, "tmpfs", "size=512k")
	must(t, syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=512k"))
	if s, err := Open(t.Context(), dir, testBoot); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a read-only file system: %v, %v", s, err)
	}
}

// Every record finds room for its end, whatever it was before the file system was full.
func TestRoomForTheEnd(t *testing.T) {
	for name, prepare := range map[string]func(s *Store, dir string) error{
		"one that fills its block, and takes one more in the end": func(s *Store, dir string) error {
			v := s.Get("v")
			must(t, published("/pod/")(v))
			mustEdit(t, s, "v", published("/pod/"+strings.Repeat("x", (4096-len(text(v)))/2-8)))
			v = s.Get("v")
			before := len(text(v))
			for _, path := range v.TargetPaths() {
				must(t, v.AskUnpublish(path, time.Now()))
			}
			if after := len(text(v)); before > 4096 || after <= 4096 {
				t.Errorf("it has %d bytes, and %d in the end", before, after)
			}
			return nil
		},
		"a kill came before its file had the room": func(s *Store, dir string) error {
			return errors.Join(os.Remove(fileOf(dir, "v")), os.WriteFile(fileOf(dir, "v"), []byte(text(s.Get("v"))), 0o600))
		},
		"a kill came before its next file had the room": func(s *Store, dir string) error {
			return os.Truncate(fileOf(dir, "v")+nextSuffix, 0)
		},
	} {
		dir := mountAt(t, "tmpfs", "size=512k")
		s := openStore(t, dir, testBoot)
		inUse(t, s, "v")
		must(t, prepare(s, dir))
		s = reopen(t, s, testBoot)
		fill(t, dir, true)
		if err := end(s, "v"); err != nil || left(t, dir) != "" {
			t.Errorf("%s: %v; left %s", name, err, left(t, dir))
		}
	}
}

// Where a file is not written over in place, and so owns no room, what is refused is
// in the file no more than in memory.
func TestRefusedWhereNothingIsWrittenInPlace(t *testing.T) {
	machine.Kernel(t)
	image := filepath.Join(t.TempDir(), "image")
	must(t, os.WriteFile(image, nil, 0o600))
	must(t, os.Truncate(image, 200<<20))
	machine.Mkfs(t, "btrfs", image)
	dir, node := t.TempDir(), machine.Losetup(t, image)
	t.Cleanup(func() { must(t, exec.Command("losetup", "-d", node).Run()) })
	must(t, syscall.Mount(node, dir, "btrfs", 0, ""))
	t.Cleanup(func() { must(t, syscall.Unmount(dir, 0)) })
	s := openStore(t, dir, testBoot)
	for i := range 6 {
		mustEdit(t, s, fmt.Sprint("v", i), staged(fmt.Sprint("/stage/", i)))
	}
	fill(t, dir, true)
	for i := range 6 {
		refused(t, s, map[string]func(*state.Volume) error{fmt.Sprint("v", i): published(fmt.Sprint("/pod/", i)), fmt.Sprint("new", i): staged(fmt.Sprint("/new/", i))})
	}
}

// A removal of a volume that has no file holds in memory while there is no room:
// nothing could come back. It is written with the next edit that can be.
func TestRemovalWithoutFile(t *testing.T) {
	dir := mountAt(t, "tmpfs", "size=512k")
	s := openStore(t, dir, testBoot)
	inUse(t, s, "v")
	must(t, os.RemoveAll(s.path))
	give := fill(t, dir, true)
	for _, id := range []string{"v", "unknown"} {
		mustEdit(t, s, id, askedAt("unpublish", "/pod/"+id))
		if !s.Get(id).Targets["/pod/"+id].Gone {
			t.Errorf("there is %s", text(s.Get(id)))
		}
	}
	refused(t, s, map[string]func(*state.Volume) error{"new": staged("/new")})
	must(t, end(s, "unknown"))
	give()
	inUse(t, s, "w")
	if s = reopen(t, s, testBoot); idsOf(s) != "v w" || !s.Get("v").Targets["/pod/v"].Gone {
		t.Errorf("there are %v", s.List())
	}
	must(t, os.Remove(fileOf(dir, "w")+nextSuffix))
	fill(t, dir, true)
	if _, err := s.Edit("w", askedAt("unpublish", "/pod/w")); !isFull(err) || s.Get("w").Targets["/pod/w"].Gone {
		t.Errorf("a removal that would come back: %v; there is %s", err, text(s.Get("w")))
	}
}
