package store

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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
		if v := s.Get("w"); v == nil || v.Revision < last || len(s.SetAside()) > 0 || s.Get("v") == nil || s.TakenFrom() != 0 {
			t.Fatalf("after the kill there is %+v, and revision %d was told; set aside: %q, taken from %d", v, last, s.SetAside(), s.TakenFrom())
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
		swap(int(old.dir.self.Fd()), fileName("a")+nextSuffix, fileName("a")), swap(unix.AT_FDCWD, half, s.path),
	} {
		t.Logf("late: %v", late)
	}
	if pairs, err := filepath.Glob(filepath.Join(s.path, "*"+nextSuffix)); err != nil || len(pairs) != 3 {
		t.Errorf("there is no room for the end of all three: %q (%v)", pairs, err)
	}
	if left(t, dir) != "a b c" || s.intact() != nil {
		t.Errorf("there is %q (%v)", left(t, dir), s.intact())
	}
	if s = reopen(t, s, testBoot); text(s.Get("a")) != text(before) || idsOf(s) != "a b c" || len(s.SetAside()) > 0 {
		t.Errorf("after what came late there is %s, set aside %q", idsOf(s), s.SetAside())
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("left %v (%v)", names, err)
	}
}

// stores are of older versions, within the test program: it may run on a machine
// without the repository.
//
//go:embed testdata/*.gz
var stores embed.FS

// older returns intents.db of an older version: one with volumes 0 to 9 and 20 to
// 29, or one that has just begun.
func older(t testing.TB, name string) []byte {
	t.Helper()
	f, err := stores.Open("testdata/" + name)
	must(t, err)
	defer f.Close() // only read from
	unzipped, err := gzip.NewReader(f)
	must(t, err)
	raw, err := io.ReadAll(unzipped)
	must(t, err)
	return raw
}

// writeOlder leaves what an older version would leave that ran after this one.
func writeOlder(t *testing.T, s *Store, raw []byte) {
	t.Helper()
	must(t, s.Close())
	if info, err := os.Stat(s.lockPath()); err != nil || info.Size() != 0 {
		t.Fatalf("an older version would find %v (%v), not a new store", info, err)
	}
	must(t, os.WriteFile(s.lockPath(), raw, 0o600))
}

// The records of an older version count, once, whatever this one has left from
// before, and whether or not there is room for both.
func TestOlderVersion(t *testing.T) {
	sound := older(t, "intents.db.gz")
	bad := bytes.Replace(sound, []byte("/stage/volume-29"), []byte("/stagf/volume-29"), -1)
	for title, row := range map[string]struct {
		raw             []byte
		full            bool
		records, asides int
	}{"sound": {sound, false, 20, 0}, "bad": {bad, false, 19, 1}, "full": {bad, true, 19, 0}} {
		dir := mountAt(t, "tmpfs", "size=1m")
		s := openStore(t, dir, testBoot)
		mustEdit(t, s, "stale", staged("/stage/stale"))
		mustEdit(t, s, "volume-07", staged("/stale"))
		writeOlder(t, s, row.raw)
		give := func() {}
		if row.full {
			give = fill(t, dir, true)
		}
		for round := range 2 {
			s = openStore(t, dir, testBoot)
			v := s.Get("volume-07")
			if len(s.List()) != row.records || s.Get("stale") != nil || v == nil || len(v.Targets) != 31 || v.Stage.Path != "/stage/volume-07" ||
				round == 0 && len(s.SetAside()) != row.asides || s.Get("volume-00").Stage.Accepted != (round == 1) {
				t.Fatalf("%s: there are %s, set aside %q", title, idsOf(s), s.SetAside())
			}
			give()
			if w := mustEdit(t, s, "volume-00", toggled); w.Revision <= 100 {
				t.Errorf("revision %d", w.Revision)
			}
			must(t, s.Close())
		}
		writeOlder(t, s, row.raw)
		if s = openStore(t, dir, "another boot"); idsOf(s) != "" {
			t.Errorf("of another boot: %s", idsOf(s))
		}
	}
}

// An older version that began, and was ended before it did anything, loses no record.
func TestOlderVersionThatDidNothing(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	mustEdit(t, s, "kept", staged("/stage/kept"))
	begun := older(t, "begun.db.gz")
	writeOlder(t, s, begun)
	if s = reopen(t, s, testBoot); idsOf(s) != "kept" || len(s.SetAside()) > 0 {
		t.Errorf("there are %s, set aside %q", idsOf(s), s.SetAside())
	}
	writeOlder(t, s, nil) // it was emptied
	if c, err := readLegacy(bytes.NewReader(bytes.ReplaceAll(begun, []byte("records"), []byte("rekords"))), testBoot); err != nil || c == nil || len(c.bad) > 0 {
		t.Errorf("one without its bucket: %v (%v)", c, err)
	}
}

// A damaged file of an older version is set aside, and kills nobody.
func TestDamageOfOlderVersion(t *testing.T) {
	sound := older(t, "intents.db.gz")
	check := func(raw []byte) {
		t.Helper()
		c, err := readLegacy(bytes.NewReader(raw), testBoot)
		if err != nil || len(c.records) > 21 { // there is one more in the transaction before the last
			t.Fatalf("%v (%v)", c, err)
		}
		if damage := fmt.Sprint(c.bad[lockName]); len(raw) < len(sound) && !strings.Contains(damage, "truncated") && !strings.Contains(damage, "meta page") {
			t.Errorf("cut to %d bytes: %v", len(raw), damage)
		}
	}
	for i := range 2000 {
		raw := append([]byte{}, sound...)
		at := (i * 7919) % len(raw)
		if i%2 == 0 { // headers and elements are where it hurts
			at = at/os.Getpagesize()*os.Getpagesize() + i/2%256
		}
		raw[at] ^= byte(1 + i%255)
		check(raw)
		if i%100 == 0 {
			check(sound[:at+1])
		}
	}
	check(sound)
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	writeOlder(t, s, bytes.Repeat([]byte("garbage\n"), 4096))
	if r, err := OpenReadOnly(t.Context(), dir); err != nil || idsOf(r) != "" {
		t.Errorf("read-only: %v, %v", r, err)
	}
	s = quietly(t, dir)
	defer func() { must(t, s.Close()) }()
	aside, err := filepath.Glob(s.lockPath() + ".corrupt-*")
	if err != nil || len(aside) != 1 || !slices.Equal(s.SetAside(), aside) || idsOf(s) != "" {
		t.Errorf("set aside: %q, there are %s", aside, idsOf(s))
	}
	mustEdit(t, s, "v", staged("/stage"))
}
