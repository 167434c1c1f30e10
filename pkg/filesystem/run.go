package filesystem

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"time"
)

const (
	outputBytes = 4 << 10          // of a program's output that are kept, the last ones
	pipeDelay   = 10 * time.Second // for output after the program has ended
)

// outcome is how a helper program ended by itself.
type outcome struct {
	program string
	code    int    // exit code
	output  string // the last of both its outputs
}

// run starts a helper program and waits until it and all its descendants are
// gone. An exit code other than 0 is no error.
//
// The program is the first process of a PID namespace of its own, so the kernel
// kills every descendant with it (pid_namespaces(7)): a wrapper's mkfs, too,
// never writes on unseen. It is killed when ctx ends, and when the thread that
// started it dies, which is locked to the caller meanwhile: when the plugin
// dies. A program that waits for a dead disk dies only when the kernel lets go
// of it, and run waits for that: a second mkfs beside it would be worse.
// There is no fallback without the namespace: who may not make one may not
// mount either.
func run(ctx context.Context, program string, args ...string) (outcome, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return outcome{}, err
	}
	if err := ctx.Err(); err != nil {
		return outcome{}, fmt.Errorf("%s was not started: %w", program, err)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var output tail
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "LC_ALL=C") // an operator may configure a program by its environment
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.WaitDelay = pipeDelay
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWPID,
		Setpgid:    true,
		Pdeathsig:  syscall.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		if errors.Is(err, syscall.EPERM) {
			return outcome{}, fmt.Errorf("start %s in a PID namespace of its own (the plugin needs CAP_SYS_ADMIN): %w", program, err)
		}
		return outcome{}, fmt.Errorf("start %s in a PID namespace of its own: %w", program, err)
	}
	err = cmd.Wait()
	o := outcome{program: program, code: cmd.ProcessState.ExitCode(), output: output.String()}
	var exit *exec.ExitError
	switch {
	case err != nil && ctx.Err() != nil:
		return o, fmt.Errorf("%s was killed: %w", program, ctx.Err())
	case errors.As(err, &exit) && o.code >= 0, err == nil:
		return o, nil
	}
	return o, fmt.Errorf("%s: %w: %s", program, err, o.output)
}

// checkExit makes an error of an exit code that is not 0.
func checkExit(o outcome, err error) error {
	if err == nil && o.code != 0 {
		return o.failure()
	}
	return err
}

func (o outcome) failure() error {
	return fmt.Errorf("%s failed with exit code %d: %s", o.program, o.code, o.output)
}

// tail is a writer that keeps the last outputBytes bytes.
type tail struct{ kept []byte }

func (t *tail) Write(p []byte) (int, error) {
	t.kept = append(t.kept, p...)
	if excess := len(t.kept) - outputBytes; excess > 0 {
		t.kept = append(t.kept[:0], t.kept[excess:]...)
	}
	return len(p), nil
}

// String returns what was kept as one line.
func (t *tail) String() string {
	lines := strings.FieldsFunc(strings.ToValidUTF8(string(t.kept), "?"), func(r rune) bool { return r == '\n' || r == '\r' })
	for i := range lines {
		lines[i] = strings.TrimSpace(lines[i])
	}
	return strings.Join(lines, "; ")
}
