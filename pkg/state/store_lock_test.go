package state

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"
)

// waitLog is a log that tells when a wait for the lock is logged.
type waitLog struct {
	testing.TB
	waits chan struct{}
}

func (l waitLog) Log(args ...any) {
	if strings.Contains(fmt.Sprint(args...), "Waiting for another csi-node process") {
		select {
		case l.waits <- struct{}{}:
		default:
		}
	}
}

// loggedWait returns a context whose logger feeds the channel at each wait.
func loggedWait(t *testing.T) (context.Context, <-chan struct{}) {
	l := waitLog{TB: t, waits: make(chan struct{}, 1)}
	return klog.NewContext(t.Context(), ktesting.NewLogger(l, ktesting.NewConfig())), l.waits
}

const holdEnv = "STATE_TEST_HOLD"

// TestHold is run by holder in a process of its own.
func TestHold(t *testing.T) {
	path := os.Getenv(holdEnv)
	if path == "" {
		return
	}
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", staged("/stage"))
	if _, err := os.Stdout.WriteString("held\n"); err != nil {
		t.Fatal(err)
	}
	go func() {
		for { // writing until the parent ends this process
			v := mustEdit(t, s, "w", toggled)
			fmt.Println(v.Revision)
		}
	}()
	if _, err := io.ReadAll(os.Stdin); err != nil {
		t.Fatal(err)
	}
	os.Exit(0)
}

// holder starts a process that holds the store at path and edits it, and tells
// the revision of each edit that has returned. It returns these and how to kill it.
func holder(t *testing.T, path string) (revisions *bufio.Scanner, kill func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, "-test.run=^TestHold$")
	cmd.Env = append(os.Environ(), holdEnv+"="+path)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	alive := true
	kill = func() {
		if alive {
			alive = false
			_ = in.Close()
			_ = cmd.Process.Kill()
			_ = cmd.Wait() // reports the kill
		}
	}
	t.Cleanup(kill)
	lines := bufio.NewScanner(out)
	if !lines.Scan() || lines.Text() != "held" {
		t.Fatalf("the holder says %q: %v", lines.Text(), lines.Err())
	}
	return lines, kill
}

func TestOpenWaitsForAnotherProcess(t *testing.T) {
	path := storePath(t)
	_, kill := holder(t, path)
	if _, err := OpenReadOnly(t.Context(), path); !errors.Is(err, ErrLocked) {
		t.Errorf("read-only beside another process: %v", err)
	}

	ctx, waits := loggedWait(t)
	ctx, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := Open(ctx, path, testBoot); !errors.Is(err, context.Canceled) {
		t.Errorf("a wait that was cancelled: %v", err)
	}
	<-waits // it is logged at once

	opened := make(chan *Store)
	go func() {
		s, err := Open(t.Context(), path, testBoot)
		if err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	kill() // SIGKILL: the store is as durable as that
	s := <-opened
	if s == nil {
		t.FailNow()
	}
	defer closeStore(t, s)
	if v := s.Get("v"); v == nil || v.Stage.Path != "/stage" {
		t.Errorf("after the kill the record is %+v", v)
	}
}

// Whatever Edit has returned is there after a kill, wherever it strikes.
func TestEditsSurviveKill(t *testing.T) {
	path := storePath(t)
	last := uint64(0)
	for round := range 8 {
		revisions, kill := holder(t, path)
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
		s := openStore(t, path, testBoot)
		if v := s.Get("w"); v == nil || v.Revision < last || s.SetAside() != "" {
			t.Fatalf("after the kill there is %+v, and revision %d was told; set aside: %q", v, last, s.SetAside())
		}
		closeStore(t, s)
	}
}

// A process that waited for a store that its holder then renamed must not take
// the renamed file.
func TestWaiterFollowsTheName(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	s := openStore(t, path, testBoot)
	ctx, waits := loggedWait(t)
	opened := make(chan *Store)
	go func() {
		s, err := Open(ctx, path, testBoot)
		if err != nil {
			t.Error(err)
		}
		opened <- s
	}()
	<-waits
	aside, err := setAside(path)
	if err != nil {
		t.Fatal(err)
	}
	closeStore(t, s)
	waiter := <-opened
	if waiter == nil {
		t.FailNow()
	}
	defer closeStore(t, waiter)
	mustEdit(t, waiter, "v", staged("/stage"))
	for name, want := range map[string]int{path: 1, aside: 0} {
		if err := waiter.Close(); err != nil {
			t.Fatal(err)
		}
		if s := openStore(t, name, testBoot); len(s.List()) != want {
			t.Errorf("%s has %d records, not %d", name, len(s.List()), want)
		}
	}
}

// An abandoned wait must release the lock that it gets later.
func TestAbandonedWaitKeepsNoLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	s := openStore(t, path, testBoot)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for range 3 {
		if _, err := Open(ctx, path, testBoot); !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
	}
	closeStore(t, s)
	openStore(t, path, testBoot)
}

func TestOpenFailsFast(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		dir:                       "no regular file",
		fifo:                      "no regular file",
		"/dev/null":               "no regular file",
		filepath.Join(file, "db"): "not a directory",
	} {
		s, err := Open(t.Context(), path, testBoot)
		if err == nil {
			closeStore(t, s)
		}
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
		if path != filepath.Join(file, "db") {
			if _, err := OpenReadOnly(t.Context(), path); err == nil {
				t.Errorf("%s was opened for reading", path)
			}
		}
	}
}

// Without space the file stays where it is: that says nothing about its contents.
func TestStoreWithoutSpace(t *testing.T) {
	dir := smallTmpfs(t)
	path := filepath.Join(dir, "intents.db")
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", staged("/stage"))

	fill(t, filepath.Join(dir, "fill"))
	var err error
	for i := 0; err == nil; i++ { // until the free pages are used up
		_, err = s.Edit("w", func(v *Volume) error {
			v.Stage = &Stage{Path: strings.Repeat("x", i*1000)}
			return nil
		})
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("an edit without space: %v", err)
	}
	was := s.Get("w")
	if err := os.Remove(filepath.Join(dir, "fill")); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Edit("u", staged("/other")); err != nil {
		t.Errorf("an edit once there is space again: %v", err)
	}
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	if s.SetAside() != "" || s.Get("v") == nil || s.Get("u") == nil || !sameRecord(s.Get("w"), was) {
		t.Errorf("after a time without space: set aside %q, %v", s.SetAside(), s.List())
	}
	closeStore(t, s)

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	fill(t, filepath.Join(dir, "fill"))
	if s, err := Open(t.Context(), path, testBoot); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a new store without space: %v, %v", s, err)
	}
	if err := syscall.Mount("", dir, "", syscall.MS_REMOUNT|syscall.MS_RDONLY, "size=512k"); err != nil {
		t.Fatal(err)
	}
	if s, err := Open(t.Context(), path, testBoot); !errors.Is(err, syscall.EROFS) {
		t.Errorf("a read-only file system: %v, %v", s, err)
	}
	names, err := filepath.Glob(path + ".corrupt-*")
	if err != nil || len(names) != 0 {
		t.Errorf("set aside: %v, %v", names, err)
	}
}

// fill writes a file until there is no space.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = f.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestOpenFollowsSymlink(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link.db")
	if err := os.Symlink("intents.db", link); err != nil {
		t.Fatal(err)
	}
	s := openStore(t, link, testBoot)
	mustEdit(t, s, "v", staged("/stage"))
	if info, err := os.Lstat(filepath.Join(dir, "intents.db")); err != nil || info.Mode()&fs.ModeType != 0 {
		t.Errorf("the store is not behind the link: %v", err)
	}
}
