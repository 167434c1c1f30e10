package store

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"golang.org/x/sys/unix"
)

// opening opens a store that somebody else has open, which is to flock(2) what another
// process is, once it logs that it waits. If that process is dead, dead is its id.
func opening(t *testing.T, dir string, dead int) <-chan *Store {
	log := make(chan string, 100)
	s, opened := newStore(dir, testBoot), make(chan *Store, 1)
	s.dead = func(*os.File) (int, error) { return dead, nil }
	t.Cleanup(func() { must(t, s.Close()) })
	go func() {
		if err := s.open(logTo(t, log)); err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	for !strings.Contains(<-log, "Waiting for another plugin process") {
	}
	return opened
}

// Who waits has the store when the other process ends, with all that it was told there,
// and not the one that was moved away meanwhile. Who gives up keeps no lock.
func TestOpenWaitsForAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	other := openStore(t, dir, testBoot)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Open(cancelled, dir, testBoot); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was cancelled: %v", err)
	}
	opened := opening(t, dir, 0)
	mustEdit(t, other, "v", staged("/stage"))
	must(t, os.Rename(other.lockPath(), filepath.Join(dir, "moved")))
	must(t, other.Close())
	s := <-opened
	if idsOf(s) != "v" || s.TakenFrom() != 0 || s.intact() != nil {
		t.Errorf("there is %s, taken from %d (%v)", idsOf(s), s.TakenFrom(), s.intact())
	}
}

// A process that is killed while it writes leaves the record as it was: nothing is
// written to the file that counts, and nobody reads the other one.
func TestKilledWhileWriting(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	before := text(mustEdit(t, s, "v", staged("/stage")))
	counts, err := os.Open(fileOf(dir, "v"))
	must(t, err)
	want := text(mustEdit(t, s, "v", toggled))
	raw, err := io.ReadAll(counts)
	if must(t, errors.Join(err, counts.Close())); string(raw) != before {
		t.Errorf("the file that counted has %s", raw)
	}
	must(t, os.WriteFile(fileOf(dir, "v")+spareSuffix, []byte("half of wh"), 0o600))
	if s = reopen(t, s, testBoot); text(s.Get("v")) != want || len(asides(t, dir)) > 0 {
		t.Errorf("there is %s, was %s; set aside: %q", text(s.Get("v")), want, asides(t, dir))
	}
}

// A process that was killed may be dead at one look, and ends. One that is dead at two
// hangs, and is taken over.
func TestTakeOverNeedsTwoLooks(t *testing.T) {
	dir := t.TempDir()
	openStore(t, dir, testBoot)
	for _, row := range []struct {
		looks []int // who is found dead, 0 is nobody
		taken int
	}{
		{[]int{4711, 0}, 0},
		{[]int{4711, 4712}, 0},
		{[]int{4711, 0, 4711, 0, 0}, 0},
		{[]int{4711, 0, 4712, 4712}, 4712},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newStore(dir, testBoot)
			waiting, err := os.Open(s.lockPath())
			must(t, err)
			defer waiting.Close() // only waited for
			ctx, cancel := context.WithCancel(t.Context())
			left := row.looks
			s.dead = func(*os.File) (dead int, err error) {
				if len(left) == 0 {
					cancel()
					return 0, nil
				}
				dead, left = left[0], left[1:]
				return dead, nil
			}
			if taken, err := s.waitForLock(ctx, waiting, unix.LOCK_EX); taken != row.taken || (err == nil) != (taken != 0) || len(left) > 0 {
				t.Errorf("looks that found %d: taken from %d (%v), not seen are %d", row.looks, taken, err, left)
			}
		})
	}
}

// From a process that is dead the store is taken over, and what the kernel yet
// does for it reaches no record.
func TestTakeOver(t *testing.T) {
	dir := t.TempDir()
	old := openStore(t, dir, testBoot)
	for _, id := range []string{"a", "b", "c"} {
		mustEdit(t, old, id, staged("/stage/"+id))
	}
	half := old.path + successorInfix + "half" // about to take the place
	must(t, os.MkdirAll(half, 0o700))
	pending, err := old.dir.root.OpenFile(fileName("a")+spareSuffix, os.O_WRONLY, 0) // about to be written
	must(t, err)
	s := <-opening(t, dir, 4711)
	if s.TakenFrom() != 4711 || idsOf(s) != "a b c" {
		t.Fatalf("taken from %d: %s", s.TakenFrom(), idsOf(s))
	}
	before := mustEdit(t, s, "a", toggled)
	_, err = pending.WriteString("late")
	for _, late := range []error{
		errors.Join(err, pending.Close()), old.dir.put(old.Get("b"), true, false), old.dir.remove(fileName("c")),
		rename(int(old.dir.self.Fd()), fileName("a")+spareSuffix, fileName("a"), unix.RENAME_EXCHANGE), rename(unix.AT_FDCWD, half, s.path, unix.RENAME_EXCHANGE),
	} {
		t.Logf("late: %v", late)
	}
	pairs, err := filepath.Glob(filepath.Join(s.path, "*"+spareSuffix))
	if must(t, err); len(pairs) != 3 || left(t, dir) != "a b c" || s.intact() != nil {
		t.Errorf("there is %q, with room for the end of %q (%v)", left(t, dir), pairs, s.intact())
	}
	if s = reopen(t, s, testBoot); text(s.Get("a")) != text(before) || idsOf(s) != "a b c" || len(asides(t, dir)) > 0 {
		t.Errorf("after what came late there is %s, set aside %q", idsOf(s), asides(t, dir))
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("left %v (%v)", names, err)
	}
}
