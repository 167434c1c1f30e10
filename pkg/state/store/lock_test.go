package store

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const holdEnv = "STATE_TEST_HOLD"

// TestHold is run by holder in a process of its own, and edits until it is killed.
func TestHold(t *testing.T) {
	if dir := os.Getenv(holdEnv); dir != "" {
		for s := openStore(t, dir, testBoot); ; {
			mustEdit(t, s, "v", toggled)
			fmt.Println(mustEdit(t, s, "w", toggled).Revision)
		}
	}
}

// holder starts a process that holds the store and edits it, and tells the
// revision of each edit of w that has returned. It returns these and how to kill it.
func holder(t *testing.T, dir string) (next func() uint64, kill func()) {
	t.Helper()
	ctx, kill := context.WithCancel(t.Context())
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestHold$")
	cmd.Env = append(os.Environ(), holdEnv+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Wait() }) // reports the kill
	lines := bufio.NewScanner(out)
	return func() uint64 {
		lines.Scan()
		revision, err := strconv.ParseUint(lines.Text(), 10, 64)
		must(t, err)
		return revision
	}, kill
}

// opening opens a store that another process has, once it logs that it waits. If
// that process is dead, it has an id.
func opening(t *testing.T, dir string, dead int) <-chan *Store {
	log := make(chan string, 100)
	s, opened := newStore(dir, testBoot), make(chan *Store, 1)
	if dead != 0 {
		s.dead = func(*os.File) (int, error) { return dead, nil }
	}
	t.Cleanup(func() { must(t, s.Close()) })
	go func() {
		if err := s.open(logTo(t, log)); err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	for !strings.Contains(<-log, "Waiting for another csi-node process") {
	}
	return opened
}

// Whatever Edit has returned is there after a kill, wherever it strikes, and who
// waits has the store then.
func TestOpenWaitsForAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	last := uint64(0)
	for round := range 8 {
		next, kill := holder(t, dir)
		told := next()
		if round == 0 {
			if _, err := OpenReadOnly(t.Context(), dir); !errors.Is(err, ErrLocked) {
				t.Errorf("read-only beside another process: %v", err)
			}
		}
		waits, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := Open(waits, dir, testBoot); !errors.Is(err, context.Canceled) { // and keeps no lock
			t.Errorf("a wait that was cancelled: %v", err)
		}
		opened := opening(t, dir, 0)
		for range 20 + round {
			if told <= last {
				t.Fatalf("revision %d after %d", told, last)
			}
			last, told = told, next()
		}
		last = told
		kill()
		s := <-opened
		if v := s.Get("w"); v == nil || v.Revision < last || len(asides(t, dir)) > 0 || s.Get("v") == nil || s.TakenFrom() != 0 {
			t.Fatalf("after the kill there is %+v, and revision %d was told; set aside: %q, taken from %d", v, last, asides(t, dir), s.TakenFrom())
		}
		must(t, s.Close())
	}
}

// A process that waited for a store that was moved away must not take what was moved.
func TestWaiterFollowsTheName(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	opened := opening(t, dir, 0)
	must(t, os.Rename(s.lockPath(), filepath.Join(dir, "moved")))
	must(t, s.Close())
	waiter := <-opened
	if same, err := stillAt(waiter.lock, s.lockPath()); err != nil || !same {
		t.Errorf("the waiter has the lock that was moved (%v)", err)
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
	pending, err := old.dir.root.OpenFile(fileName("a")+nextSuffix, os.O_WRONLY, 0) // about to be written
	must(t, err)
	s := <-opening(t, dir, 4711)
	if s.TakenFrom() != 4711 || idsOf(s) != "a b c" {
		t.Fatalf("taken from %d: %s", s.TakenFrom(), idsOf(s))
	}
	before := mustEdit(t, s, "a", toggled)
	_, err = pending.WriteString("late")
	for _, late := range []error{
		errors.Join(err, pending.Close()), old.dir.put(old.Get("b"), false), old.dir.remove(fileName("c")),
		exchange(int(old.dir.self.Fd()), fileName("a")+nextSuffix, fileName("a")), exchange(unix.AT_FDCWD, half, s.path),
	} {
		t.Logf("late: %v", late)
	}
	if pairs, err := filepath.Glob(filepath.Join(s.path, "*"+nextSuffix)); err != nil || len(pairs) != 3 {
		t.Errorf("there is no room for the end of all three: %q (%v)", pairs, err)
	}
	if left(t, dir) != "a b c" || s.intact() != nil {
		t.Errorf("there is %q (%v)", left(t, dir), s.intact())
	}
	if s = reopen(t, s, testBoot); text(s.Get("a")) != text(before) || idsOf(s) != "a b c" || len(asides(t, dir)) > 0 {
		t.Errorf("after what came late there is %s, set aside %q", idsOf(s), asides(t, dir))
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("left %v (%v)", names, err)
	}
}
