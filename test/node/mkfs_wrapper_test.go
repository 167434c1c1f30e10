package node

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// wrapper is an mkfs.ext4 that stands before the real one in the PATH: it tells
// of each run, and waits at a gate.
type wrapper struct {
	t       *testing.T
	dir     string
	gate    *os.File // locked: the wrapper waits
	started *bufio.Reader
	pipe    *os.File
}

// How a wrapper goes on behind the gate. In a script, $0 is its own path.
const (
	byExec       = `flock -s "$gate" true; exec "$real" "$@"`
	byGrandchild = `bash -c 'flock -s "$0" true; exec "$@"' "$gate" "$real" "$@" & wait $!`
)

// wrapMkfs makes a wrapper whose gate is closed.
func wrapMkfs(t *testing.T, p *harness.Plugin, then string) *wrapper {
	t.Helper()
	real, err := exec.LookPath("mkfs.ext4")
	must(t, err)
	w := &wrapper{t: t, dir: filepath.Join(p.Dir, "bin")}
	makeDir(t, w.dir)
	script := fmt.Sprintf("#!/bin/bash\ndir=%q gate=%q real=%q\necho \"$@\" >>$dir/runs\necho started >$dir/started\n%s\n",
		w.dir, filepath.Join(w.dir, "gate"), real, then)
	machine.WriteProgram(t, filepath.Join(w.dir, "mkfs.ext4"), script)
	write(t, filepath.Join(w.dir, "runs"), "")
	fifo := filepath.Join(w.dir, "started")
	must(t, unix.Mkfifo(fifo, 0o600))
	w.pipe, err = os.OpenFile(fifo, os.O_RDWR|unix.O_NONBLOCK, 0) // for writing too, so that no wrapper waits for a reader
	must(t, err)
	w.started = bufio.NewReader(w.pipe)
	w.gate, err = os.Create(filepath.Join(w.dir, "gate"))
	must(t, err)
	must(t, unix.Flock(int(w.gate.Fd()), unix.LOCK_EX))
	t.Cleanup(func() {
		w.open()
		_ = w.pipe.Close()
	})
	return w
}

// startWithMkfs starts a plugin whose mkfs waits at a closed gate, and makes a volume that
// it has to format.
func startWithMkfs(t *testing.T, then string) (*harness.Plugin, *wrapper, *volume) {
	t.Helper()
	p := harness.New(t)
	w := wrapMkfs(t, p, then)
	p.Start(harness.Options{Env: w.env()})
	return p, w, create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter))
}

// stageInto begins to stage a volume and returns when its mkfs was started.
func (w *wrapper) stageInto(v *volume) <-chan error {
	w.t.Helper()
	staged := make(chan error, 1)
	go func() { staged <- v.Stage(w.t.Context()) }()
	w.awaitStart()
	return staged
}

// env puts the wrapper first.
func (w *wrapper) env() []string { return []string{"PATH=" + w.dir + ":" + os.Getenv("PATH")} }

// awaitStart blocks until the wrapper was started once more.
func (w *wrapper) awaitStart() {
	w.t.Helper()
	must(w.t, w.pipe.SetReadDeadline(time.Now().Add(harness.Patience)))
	_, err := w.started.ReadString('\n')
	must(w.t, err)
}

// open lets the wrappers through that wait and those that come.
func (w *wrapper) open() { _ = w.gate.Close() }

// mustHaveRun fails the test unless the wrapper was started so often.
func (w *wrapper) mustHaveRun(times int) {
	w.t.Helper()
	lines, err := os.ReadFile(filepath.Join(w.dir, "runs"))
	must(w.t, err)
	if runs := strings.Count(string(lines), "\n"); runs != times {
		w.t.Errorf("mkfs was run %d times, want %d", runs, times)
	}
}
