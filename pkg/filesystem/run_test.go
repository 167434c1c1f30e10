package filesystem

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// hang is after what time a test fails that waits for a process to start or to
// die. What the process left behind ends by itself (sleep 60).
const hang = 20 * time.Second

// runProgram makes the test binary a process that only runs the named program,
// so that a test can kill the runner.
const runProgram = "FILESYSTEM_TEST_RUN"

func TestMain(m *testing.M) {
	if program := os.Getenv(runProgram); program != "" {
		_, err := run(context.Background(), program)
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// fifo is a pipe that a program and its descendants hold open for writing: it
// ends when the last of them is gone.
type fifo struct {
	path   string
	reader *bufio.Reader
}

func newFIFO(t *testing.T) *fifo {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	must0(t, unix.Mkfifo(path, 0o600))
	return &fifo{path: path}
}

// waitFor blocks until a program has opened the pipe and written the line.
func (f *fifo) waitFor(t *testing.T, want string) {
	t.Helper()
	opened := make(chan *os.File, 1)
	go func() {
		file, err := os.Open(f.path) // waits for the writer
		if err != nil {
			t.Error(err)
		}
		opened <- file
	}()
	var file *os.File
	select {
	case file = <-opened:
		t.Cleanup(func() { must0(t, file.Close()) })
	case <-time.After(hang):
		t.Fatalf("nobody has opened %s", f.path)
	}
	must0(t, file.SetReadDeadline(time.Now().Add(hang)))
	f.reader = bufio.NewReader(file)
	line, err := f.reader.ReadString('\n')
	if err != nil || strings.TrimSpace(line) != want {
		t.Fatalf("read %q, %v; want %q", line, err, want)
	}
}

// waitForEnd blocks until no process has the pipe open.
func (f *fifo) waitForEnd(t *testing.T) {
	t.Helper()
	_, err := io.Copy(io.Discard, f.reader)
	must0(t, err)
}

// family is a script whose descendants have left its session and its process group.
func family(line *fifo) string {
	return "exec 9>" + line.path + "\nsetsid sh -c 'sleep 60 & sleep 60' &\necho started >&9\nwait"
}

func TestRunOutcome(t *testing.T) {
	script(t, "helper", `echo "out $1 $LC_ALL $HOME"; echo err >&2; [ "$$" = 1 ] || exit 99; read line; exit 7`)
	t.Setenv("HOME", "/inherited")
	o, err := run(t.Context(), "helper", "argument")
	must0(t, err)
	if o.code != 7 || o.output != "out argument C /inherited; err" {
		t.Errorf("%+v", o)
	}
	wantClass(t, checkExit(o, nil), state.Unavailable, "helper failed with exit code 7: out argument C /inherited")
}

func TestRunKeepsLastOutput(t *testing.T) {
	script(t, "helper", "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done")
	o, err := run(t.Context(), "helper")
	must0(t, err)
	if len(o.output) > 2*outputBytes || !strings.HasSuffix(o.output, "line 1998; line 1999") {
		t.Errorf("%d bytes kept: %s", len(o.output), o.output)
	}
}

func TestRunFailures(t *testing.T) {
	_, err := run(t.Context(), "no-such-program")
	wantClass(t, err, state.Unavailable, "no-such-program")
	// The first process of a PID namespace ignores what it sends itself, so
	// its descendant, which is killed by a signal, tells the shell.
	script(t, "helper", "sh -c 'kill -KILL $$'; exit $?")
	if o, err := run(t.Context(), "helper"); err != nil || o.code != 128+9 {
		t.Errorf("%+v, %v", o, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = run(ctx, "helper")
	wantClass(t, err, state.Canceled, "was not started")
}

// What a program leaves behind when it ends is gone with it.
func TestRunLeavesNothing(t *testing.T) {
	line := newFIFO(t)
	script(t, "helper", "exec 9>"+line.path+"\nsetsid sleep 60 &\necho started >&9")
	done := make(chan error, 1)
	go func() {
		_, err := run(t.Context(), "helper")
		done <- err
	}()
	line.waitFor(t, "started")
	must0(t, <-done)
	line.waitForEnd(t)
}

func TestRunCancelKillsDescendants(t *testing.T) {
	line := newFIFO(t)
	script(t, "helper", family(line))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := run(ctx, "helper")
		done <- err
	}()
	line.waitFor(t, "started")
	cancel()
	wantClass(t, <-done, state.Canceled, "helper was killed")
	line.waitForEnd(t)
}

func TestRunDiesWithItsParent(t *testing.T) {
	line := newFIFO(t)
	script(t, "helper", family(line))
	self, err := os.Executable()
	must0(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), runProgram+"=helper")
	must0(t, parent.Start())
	line.waitFor(t, "started")
	must0(t, parent.Process.Kill())
	line.waitForEnd(t)
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended well")
	}
}
