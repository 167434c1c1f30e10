package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// Patience bounds every wait of the harness. It is no measure of speed: the
// machine may be busy, or simulated.
const Patience = 3 * time.Minute

// Process is one run of the binary. It leads a session of its own, by which
// its helper programs are known even after its death.
type Process struct {
	Log    *Log
	cmd    *exec.Cmd
	exited chan struct{} // closed once it was waited for
}

// launch starts a program; env is added to the test's own environment.
func launch(t testing.TB, path string, env []string, args ...string) *Process {
	t.Helper()
	p := &Process{Log: &Log{}, cmd: exec.Command(path, args...), exited: make(chan struct{})}
	p.cmd.Env = environment(env)
	p.cmd.Stdout, p.cmd.Stderr = p.Log, p.Log
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	p.cmd.WaitDelay = 5 * time.Second
	require.NoError(t, p.cmd.Start())
	go func() {
		defer close(p.exited)
		_ = p.cmd.Wait() // ProcessState tells
	}()
	return p
}

// environment is the test's own without what would set the plugin up, and more.
// The race detector is told not to wait a second at the end of each process.
func environment(more []string) []string {
	own := slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "CSI_") })
	return append(append(own, "GORACE=atexit_sleep_ms=0"), more...)
}

// PID returns the process id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// WhileAlive returns a context that ends with the process: a call made after its death would
// wait for the next one.
func (p *Process) WhileAlive(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		select {
		case <-p.exited:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// Signal sends a signal; a process that has ended takes it in silence.
func (p *Process) Signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		t.Fatal(err)
	}
}

// Wait blocks until the process has ended and says how. One that does not end
// within Patience fails the test with all its goroutines in the log, and is killed.
func (p *Process) Wait(t testing.TB) *os.ProcessState {
	t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState
	case <-time.After(Patience):
	}
	t.Errorf("process %d does not end", p.PID())
	for _, signal := range []syscall.Signal{syscall.SIGQUIT, syscall.SIGKILL} { // SIGQUIT prints the goroutines
		p.Signal(t, signal)
		select {
		case <-p.exited:
			return p.cmd.ProcessState
		case <-time.After(10 * time.Second):
		}
	}
	t.Fatalf("process %d cannot be killed", p.PID())
	return nil
}

// Helpers returns the processes that the process has started, directly or not,
// and that live, also after its own death.
func (p *Process) Helpers(t testing.TB) []*Helper {
	t.Helper()
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	var helpers []*Helper
	for _, file := range all {
		stat, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		require.NoError(t, err)
		// pid (comm) state ppid pgrp session …; comm may hold anything.
		fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if pid == p.PID() || fields[0] == "Z" || fields[3] != strconv.Itoa(p.PID()) {
			continue
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if errors.Is(err, unix.ESRCH) {
			continue
		} else if err != nil {
			t.Fatal(err)
		}
		cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline")) // empty if it has just ended
		h := &Helper{PID: pid, Command: strings.ReplaceAll(strings.TrimRight(string(cmdline), "\x00"), "\x00", " "), fd: fd}
		t.Cleanup(func() { _ = unix.Close(h.fd) })
		helpers = append(helpers, h)
	}
	return helpers
}

// Helper is a process that a Process has started.
type Helper struct {
	PID     int
	Command string
	fd      int // pidfd, so that no other process is taken for it
}

// AwaitEnd blocks until the helper has ended, or for ten seconds, and reports
// whether it has.
func (h *Helper) AwaitEnd() (bool, error) {
	for deadline := time.Now().Add(10 * time.Second); ; {
		left := max(time.Until(deadline), 0)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(h.fd), Events: unix.POLLIN}}, int(left.Milliseconds()))
		if !errors.Is(err, unix.EINTR) {
			return n > 0, err
		}
	}
}

func (h *Helper) String() string { return fmt.Sprintf("%d (%s)", h.PID, h.Command) }

// Result is how a command has ended.
type Result struct {
	Code           int // exit code
	Stdout, Stderr string
}

// Run runs a program to its end, which must come within Patience.
func Run(t testing.TB, env []string, path string, args ...string) Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience) // it may be part of the cleaning up
	defer cancel()
	var stdout, stderr strings.Builder
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = environment(env)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case ctx.Err() != nil:
		t.Fatalf("%s %q does not end:\n%s%s", path, args, stdout.String(), stderr.String())
	case err != nil && !errors.As(err, &exit):
		t.Fatal(err)
	}
	return Result{cmd.ProcessState.ExitCode(), stdout.String(), stderr.String()}
}

// Command runs a tool of the system that must succeed.
var Command = machine.Command
