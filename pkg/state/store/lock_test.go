package store

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

const holdEnv = "STATE_TEST_HOLD"

// toggled changes something with each edit.
func toggled(v *state.Volume) error {
	if v.Stage == nil {
		return staged(fmt.Sprintf("/var/lib/kubelet/plugins/kubernetes.io/csi/csi-node/%064s/globalmount", v.ID))(v)
	}
	v.Stage.Accepted = !v.Stage.Accepted
	return nil
}

// TestHold is run by holder in a process of its own.
func TestHold(t *testing.T) {
	dir := os.Getenv(holdEnv)
	if dir == "" {
		return
	}
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "v", staged("/stage"))
	fmt.Println("held")
	go func() {
		for { // writing until the parent ends this process
			fmt.Println(mustEdit(t, s, "w", toggled).Revision)
		}
	}()
	_, err := io.ReadAll(os.Stdin)
	must(t, err)
	os.Exit(0)
}

// holder starts a process that holds the store and edits it, and tells the
// revision of each edit that has returned. It returns these and how to kill it.
func holder(t *testing.T, dir string) (revisions *bufio.Scanner, kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestHold$")
	cmd.Env = append(os.Environ(), holdEnv+"="+dir)
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	alive := true
	kill = func() {
		if alive {
			alive = false
			_, _, _ = in.Close(), cmd.Process.Kill(), cmd.Wait() // reports the kill
		}
	}
	t.Cleanup(kill)
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "held" {
		t.Fatalf("the holder says %q: %v", lines.Text(), lines.Err())
	}
	return lines, kill
}

// opening opens a store that another process has, once it logs that it waits.
func opening(t *testing.T, o opener, dir string) <-chan *Store {
	ctx, log := logs(t)
	opened := make(chan *Store, 1)
	go func() {
		s, err := o.open(ctx, dir, testBoot)
		if err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	for !log.has("Waiting for another csi-node process") {
		<-log.line
	}
	return opened
}

// Whatever Edit has returned is there after a kill, wherever it strikes, and who
// waits has the store then.
func TestOpenWaitsForAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	last := uint64(0)
	for round := range 8 {
		revisions, kill := holder(t, dir)
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
		opened := opening(t, opener{deadHolder}, dir)
		for range 20 + round {
			if !revisions.Scan() {
				t.Fatal(revisions.Err())
			}
			revision, err := strconv.ParseUint(revisions.Text(), 10, 64)
			if err != nil || revision <= last {
				t.Fatalf("revision %q after %d: %v", revisions.Text(), last, err)
			}
			last = revision
		}
		kill()
		s := <-opened
		if v := s.Get("w"); v == nil || v.Revision < last || len(s.SetAside()) > 0 || s.Get("v") == nil || s.TakenFrom() != 0 {
			t.Fatalf("after the kill there is %+v, and revision %d was told; set aside: %q, taken from %d", v, last, s.SetAside(), s.TakenFrom())
		}
		closeStore(t, s)
	}
}

// A process that waited for a store that was moved away must not take what was moved.
func TestWaiterFollowsTheName(t *testing.T) {
	for _, name := range []string{Directory, "intents.db"} {
		dir := t.TempDir()
		s := openStore(t, dir, testBoot)
		if name == Directory { // whose lock comes second
			must(t, s.legacy.Close())
			s.legacy = nil
		}
		opened := opening(t, opener{deadHolder}, dir)
		must(t, os.Rename(filepath.Join(dir, name), filepath.Join(dir, "moved")))
		crash(t, s)
		waiter := <-opened
		mustEdit(t, waiter, "v", staged("/stage"))
		closeStore(t, waiter)
		if left(t, dir) != "v" {
			t.Errorf("%s: there is %q", name, left(t, dir))
		}
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
	name := fileName("late")
	must(t, old.dir.root.WriteFile(name+freshSuffix, []byte(text(old.Get("a"))), 0o600)) // about to be renamed
	half := filepath.Join(dir, Directory+successorInfix+"half")                          // about to take the place
	must(t, os.MkdirAll(half, 0o700))
	dead := func(*os.File) (int, error) { return 4711, nil }
	s := <-opening(t, opener{dead}, dir)
	if s.TakenFrom() != 4711 || idsOf(s) != "a b c" {
		t.Fatalf("taken from %d: %s", s.TakenFrom(), idsOf(s))
	}
	before := mustEdit(t, s, "a", accepted)
	if err := old.dir.root.Rename(name+freshSuffix, name); err == nil {
		t.Error("it could still be renamed")
	}
	for _, late := range []error{
		old.dir.put(old.Get("a"), []byte("late"), false), old.dir.put(old.Get("b"), []byte("late"), false), old.dir.remove(fileName("c")),
		unix.Renameat2(unix.AT_FDCWD, half, unix.AT_FDCWD, s.path, unix.RENAME_EXCHANGE), old.dir.writeSpare(fileName("b"), []byte("late")),
	} {
		t.Logf("late: %v", late)
	}
	if left(t, dir) != "a b c" || s.dir.intact() != nil {
		t.Errorf("there is %q (%v)", left(t, dir), s.dir.intact())
	}
	crash(t, s)
	if s = openStore(t, dir, testBoot); text(s.Get("a")) != text(before) || idsOf(s) != "a b c" || len(s.SetAside()) > 0 {
		t.Errorf("after what came late there is %s, set aside %q", idsOf(s), s.SetAside())
	}
	if names, err := os.ReadDir(dir); err != nil || len(names) != 2 {
		t.Errorf("left %v (%v)", names, err)
	}
	old.dir = nil // its lock is that of a dead process
	old.legacy = nil
}

// older returns intents.db of an older version: volumes 0 to 9 and 20 to 29.
func older(t testing.TB) []byte {
	t.Helper()
	return unzip(t, "testdata/intents.db.gz")
}

func unzip(t testing.TB, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close() // only read from
	unzipped, err := gzip.NewReader(f)
	must(t, err)
	raw, err := io.ReadAll(unzipped)
	must(t, err)
	return raw
}

// The records of an older version count, once, whatever this one has left from
// before, and whether or not there is room for both.
func TestOlderVersion(t *testing.T) {
	for title, raw := range map[string][]byte{"sound": older(t), "bad": bytes.Replace(older(t), []byte("/stage/volume-29"), []byte("/stagf/volume-29"), -1)} {
		dir := mountAt(t, "tmpfs", "size=512k")
		s := openStore(t, dir, testBoot)
		mustEdit(t, s, "stale", staged("/stage/stale"))
		mustEdit(t, s, "volume-07", staged("/stale"))
		closeStore(t, s)
		if info, err := os.Stat(legacyPath(dir)); err != nil || info.Size() != 0 {
			t.Fatalf("an older version would find %v (%v), not a new store", info, err)
		}
		must(t, os.WriteFile(legacyPath(dir), raw, 0o600))
		give := func() {}
		if title == "bad" {
			give = fill(t, dir, true)
		}
		for round, asides := range []int{strings.Count(title, "bad"), 0} {
			s = openStore(t, dir, testBoot)
			v := s.Get("volume-07")
			if len(s.List()) != 20-strings.Count(title, "bad") || s.Get("stale") != nil || v == nil || len(v.Targets) != 31 || v.Stage.Path != "/stage/volume-07" ||
				len(s.unwritten) > 0 || len(s.SetAside()) != asides || s.Get("volume-00").Stage.Accepted != (round == 1) {
				t.Fatalf("%s: there are %s, unwritten %v, set aside %q", title, idsOf(s), s.unwritten, s.SetAside())
			}
			if w := mustEdit(t, s, "volume-00", toggled); w.Revision <= 100 {
				t.Errorf("revision %d", w.Revision)
			}
			crash(t, s)
		}
		give()
		must(t, os.WriteFile(legacyPath(dir), raw, 0o600))
		if s = openStore(t, dir, "another boot"); idsOf(s) != "" {
			t.Errorf("of another boot: %s", idsOf(s))
		}
	}
}

// An older version that began, and was ended before it did anything, loses no record.
func TestOlderVersionThatDidNothing(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "kept", staged("/stage/kept"))
	crash(t, s)
	begun := unzip(t, "testdata/begun.db.gz")
	must(t, os.WriteFile(legacyPath(dir), begun, 0o600))
	s = openStore(t, dir, testBoot)
	defer closeStore(t, s)
	if info, err := os.Stat(legacyPath(dir)); err != nil || info.Size() != 0 || idsOf(s) != "kept" || len(s.SetAside()) > 0 {
		t.Errorf("there are %s, set aside %q; %v (%v)", idsOf(s), s.SetAside(), info, err)
	}
	if c, damage, err := readLegacy(bytes.NewReader(bytes.ReplaceAll(begun, []byte("records"), []byte("rekords"))), testBoot); c == nil || damage != nil || err != nil {
		t.Errorf("one without its bucket: %v, damage %v (%v)", c, damage, err)
	}
}

// A damaged file of an older version is set aside, and kills nobody.
func TestDamageOfOlderVersion(t *testing.T) {
	sound := older(t)
	dir := t.TempDir()
	check := func(raw []byte) {
		t.Helper()
		c, damage, err := readLegacy(bytes.NewReader(raw), testBoot)
		if err != nil || (c == nil) != (damage != nil) {
			t.Fatalf("%v, damage %v (%v)", c, damage, err)
		}
		if len(raw) < len(sound) && !strings.Contains(fmt.Sprint(damage), "truncated") && !strings.Contains(fmt.Sprint(damage), "meta page") {
			t.Errorf("cut to %d bytes: %v", len(raw), damage)
		}
		if c != nil && len(c.records) > 21 { // there is one more in the transaction before the last
			t.Errorf("there are %d records", len(c.records))
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
	check(older(t))
	must(t, os.WriteFile(legacyPath(dir), []byte(strings.Repeat("garbage\n", 4096)), 0o600))
	if r, err := OpenReadOnly(t.Context(), dir); err != nil || idsOf(r) != "" {
		t.Errorf("read-only: %v, %v", r, err)
	}
	s := quietly(t, dir)
	defer closeStore(t, s)
	if names, err := filepath.Glob(legacyPath(dir) + ".corrupt-*"); err != nil || len(names) != 1 || len(s.SetAside()) != 1 || idsOf(s) != "" {
		t.Errorf("set aside: %q, there are %s", names, idsOf(s))
	}
	mustEdit(t, s, "v", staged("/stage"))
}
