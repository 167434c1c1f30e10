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

	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// fill takes all room of a file system with files of a size: 4096 takes all blocks, 0
// all inodes. The room comes back with give.
func fill(t *testing.T, dir string, size int) (give func()) {
	t.Helper()
	dir = filepath.Join(dir, "fill")
	must(t, os.MkdirAll(dir, 0o700))
	var err error
	for i := 0; err == nil; i++ {
		err = os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), make([]byte, size), 0o600)
	}
	if !durable.LacksRoom(err) {
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

// end takes back all that a record asks for: each part is asked to go, then all is gone.
func end(s *Store, id string) (err error) {
	v, edits := s.Get(id), []func(*state.Volume) error{}
	for _, path := range v.TargetPaths() {
		edits = append(edits, unpublished(path))
	}
	for _, edit := range append(edits, unstaged(v.Stage.Path), emptied) {
		_, failed := s.Edit(id, edit)
		err = errors.Join(err, failed)
	}
	return err
}

// left names the records that a process which is killed now would leave.
func left(t *testing.T, dir string) string {
	t.Helper()
	c, err := read(filepath.Join(dir, Directory), testBoot)
	if must(t, err); len(c.bad) > 0 {
		t.Errorf("damaged: %v", c.bad)
	}
	return ids(c.records)
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
	for options, size := range map[string]int{"size=512k": 4096, "size=512k,nr_inodes=100": 0} {
		dir := mountAt(t, "tmpfs", options)
		s := openStore(t, dir, testBoot)
		for i := range 40 {
			inUse(t, s, fmt.Sprint("v", i))
		}
		give := fill(t, dir, size)
		news := map[string]func(*state.Volume) error{"new": staged("/new")}
		if size > 0 {
			news["v0"] = published("/" + strings.Repeat("long/", 250)) // which takes two blocks more
		}
		must(t, os.Remove(filepath.Join(dir, "fill", "0"))) // there is room for one file of a new record
		refused(t, s, news)
		s = reopen(t, s, testBoot) // as a plugin that starts
		refused(t, s, news)
		var group sync.WaitGroup
		for i := range 40 {
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
}

// What is proposed on a full file system waits until there is room.
func TestProposalWithoutRoom(t *testing.T) {
	dir := mountAt(t, "tmpfs", "size=512k")
	s := openStore(t, dir, testBoot)
	give := fill(t, dir, 4096)
	v, err := s.Propose("v", staged("/stage"))
	must(t, err)
	for range 2 {
		require.Class(t, s.Flush("v"), state.ResourceExhausted, "full")
	}
	give()
	must(t, s.Flush("v"))
	if s = reopen(t, s, testBoot); text(s.Get("v")) != text(v) {
		t.Errorf("there is %s", text(s.Get("v")))
	}
}

// A call proposes, and flushes before anything is done: it can end what is there, too, be
// there a file of it or not, and though another call has proposed what there is no room for.
func TestProposedEndWithoutRoom(t *testing.T) {
	dir := mountAt(t, "tmpfs", "size=512k")
	s := openStore(t, dir, testBoot)
	inUse(t, s, "v")
	give := fill(t, dir, 4096)
	defer give()
	long := "/" + strings.Repeat("long/", 250) // which takes two blocks more
	for id, ends := range map[string][]func(*state.Volume) error{
		"lost": {unpublished("/pod")},
		"v": {
			published(long),
			func(v *state.Volume) error { v.Withdraw(state.TargetPart(long), time.Now()); return nil },
			unpublished("/pod/v"),
		},
	} {
		for i, edit := range ends {
			if _, err := s.Propose(id, edit); err != nil {
				t.Errorf("volume %s, edit %d: %v", id, i, err)
			}
		}
		if err := s.Flush(id); err != nil {
			t.Errorf("volume %s: %v", id, err)
		}
	}
}

// Every record finds room for its end, whatever it was before the file system was full.
func TestRoomForTheEnd(t *testing.T) {
	for name, prepare := range map[string]func(s *Store, dir string) error{
		"one that fills its block, and takes one more in the end": func(s *Store, dir string) error {
			v := s.Get("v").Clone()
			must(t, published("/pod/")(v))
			_, err := s.Edit("v", published("/pod/"+strings.Repeat("x", (4096-len(text(v)))/2-8)))
			v = s.Get("v").Clone()
			before := len(text(v))
			must(t, errors.Join(unpublished("/pod/v")(v), unpublished(v.TargetPaths()[1])(v)))
			if after := len(text(v)); before > 4096 || after <= 4096 {
				t.Errorf("it has %d bytes, and %d in the end", before, after)
			}
			return err
		},
		"a kill came before its file had the room": func(s *Store, dir string) error {
			return errors.Join(os.Remove(fileOf(dir, "v")), os.WriteFile(fileOf(dir, "v"), []byte(text(s.Get("v"))), 0o600))
		},
		"a kill came before its spare file had the room": func(s *Store, dir string) error {
			return os.Truncate(fileOf(dir, "v")+spareSuffix, 0)
		},
	} {
		dir := mountAt(t, "tmpfs", "size=512k")
		s := openStore(t, dir, testBoot)
		inUse(t, s, "v")
		must(t, prepare(s, dir))
		s = reopen(t, s, testBoot)
		fill(t, dir, 4096)
		if err := end(s, "v"); err != nil || left(t, dir) != "" {
			t.Errorf("%s: %v; left %s", name, err, left(t, dir))
		}
	}
}

// A removal of a volume that has no file holds in memory while there is no room:
// nothing could come back. It is written with the next edit that can be.
func TestRemovalWithoutFile(t *testing.T) {
	dir := mountAt(t, "tmpfs", "size=512k")
	s := openStore(t, dir, testBoot)
	inUse(t, s, "v")
	must(t, os.RemoveAll(s.path))
	give := fill(t, dir, 4096)
	mustEdit(t, s, "v", unpublished("/pod/v"))
	mustEdit(t, s, "unknown", unpublished("/pod/unknown"))
	if !s.Get("v").Targets["/pod/v"].Gone || !s.Get("unknown").Targets["/pod/unknown"].Gone {
		t.Errorf("there is %+v", s.List())
	}
	refused(t, s, map[string]func(*state.Volume) error{"new": staged("/new")})
	mustEdit(t, s, "unknown", emptied)
	give()
	inUse(t, s, "w")
	if s = reopen(t, s, testBoot); idsOf(s) != "v w" || !s.Get("v").Targets["/pod/v"].Gone {
		t.Errorf("there are %v", s.List())
	}
	must(t, os.Remove(fileOf(dir, "w")+spareSuffix))
	fill(t, dir, 4096)
	if _, err := s.Edit("w", unpublished("/pod/w")); !durable.LacksRoom(err) || s.Get("w").Targets["/pod/w"].Gone {
		t.Errorf("a removal that would come back: %v; there is %s", err, text(s.Get("w")))
	}
}
