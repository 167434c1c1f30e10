package machine

import (
	"bufio"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/require"
)

// Command runs a tool of the system that must succeed, and returns its output
// without the last newline.
func Command(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v: %s", name, strings.Join(args, " "), err, out)
	}
	return strings.TrimRight(string(out), "\n")
}

// WriteProgram writes a program that can be executed at once. No process may be forked
// meanwhile, by another test: it would have the file open for writing for a moment longer,
// and whoever executes it would be told that it is busy (ETXTBSY).
func WriteProgram(t testing.TB, path, text string) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	require.NoError(t, os.WriteFile(path, []byte(text), 0o755))
}

// Script makes a shell script the first program of that name in PATH.
func Script(t testing.TB, name, body string) {
	t.Helper()
	Kernel(t)
	dir := t.TempDir()
	WriteProgram(t, filepath.Join(dir, name), "#!/bin/sh\n"+body+"\n")
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// patience is after what time a test fails that waits for a process to start or to
// die. What the process leaves behind is to end by itself (sleep 60).
const patience = 20 * time.Second

// FIFO is a pipe that a program and its descendants hold open for writing: it
// ends when the last of them is gone.
type FIFO struct {
	Path   string
	file   *os.File // open for reading since it was first waited for
	reader *bufio.Reader
}

// NewFIFO makes one.
func NewFIFO(t *testing.T) *FIFO {
	t.Helper()
	path := filepath.Join(t.TempDir(), "fifo")
	require.NoError(t, unix.Mkfifo(path, 0o600))
	return &FIFO{Path: path}
}

// WaitFor blocks until a program has opened the pipe and written the next line.
func (f *FIFO) WaitFor(t *testing.T, want string) {
	t.Helper()
	if f.file == nil { // else the program may have written the line, and ended
		f.open(t)
	}
	require.NoError(t, f.file.SetReadDeadline(time.Now().Add(patience)))
	line, err := f.reader.ReadString('\n')
	if err != nil || strings.TrimSpace(line) != want {
		t.Fatalf("read %q, %v; want %q", line, err, want)
	}
}

func (f *FIFO) open(t *testing.T) {
	t.Helper()
	opened := make(chan *os.File, 1)
	go func() {
		file, err := os.Open(f.Path) // waits for the writer
		if err != nil {
			t.Error(err)
		}
		opened <- file
	}()
	select {
	case f.file = <-opened:
		t.Cleanup(func() { require.NoError(t, f.file.Close()) })
	case <-time.After(patience):
		t.Fatalf("nobody has opened %s", f.Path)
	}
	f.reader = bufio.NewReader(f.file)
}

// WaitForEnd blocks until no process has the pipe open.
func (f *FIFO) WaitForEnd(t *testing.T) {
	t.Helper()
	_, err := io.Copy(io.Discard, f.reader)
	require.NoError(t, err)
}
