package helper

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// runProgram makes the test binary a process that only runs the named program,
// so that a test can kill the runner.
const runProgram = "HELPER_TEST_RUN"

// runOutlives makes that program one which outlives the process.
const runOutlives = "HELPER_TEST_OUTLIVES"

func TestMain(m *testing.M) {
	if program := os.Getenv(runProgram); program != "" {
		p := alone(program)
		if os.Getenv(runOutlives) != "" {
			p = Program{Name: program, Outlives: true}
		}
		_, err := p.Run(context.Background())
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func alone(name string, args ...string) Program { return Program{Name: name, Args: args, Alone: true} }

// family is a script whose descendants have left its session and its process group.
func family(line *machine.FIFO) string {
	return "exec 9>" + line.Path + "\nsetsid sh -c 'sleep 60 & sleep 60' &\necho started >&9\nwait"
}

func TestRunOutcome(t *testing.T) {
	machine.Script(t, "helper", `echo "out $1 $LC_ALL $HOME"; echo err >&2; [ "$$" = 1 ] || exit 99; read line; exit 7`)
	t.Setenv("HOME", "/inherited")
	o, err := alone("helper", "argument").Run(t.Context())
	require.NoError(t, err)
	if o.Code != 7 || o.Output != "out argument C /inherited; err" {
		t.Errorf("%+v", o)
	}
	require.Class(t, alone("helper", "argument").Check(t.Context()), state.Unavailable, "helper failed with exit code 7: out argument C /inherited")
}

func TestRunKeepsLastOutput(t *testing.T) {
	machine.Script(t, "helper", "i=0; while [ $i -lt 2000 ]; do echo line $i; i=$((i+1)); done")
	o, err := alone("helper").Run(t.Context())
	require.NoError(t, err)
	if len(o.Output) > 2*outputBytes || !strings.HasSuffix(o.Output, "line 1998; line 1999") {
		t.Errorf("%d bytes kept: %s", len(o.Output), o.Output)
	}
}

func TestRunFailures(t *testing.T) {
	_, err := alone("no-such-program").Run(t.Context())
	require.Class(t, err, state.Unavailable, "no-such-program")
	// The first process of a PID namespace ignores what it sends itself, so
	// its descendant, which is killed by a signal, tells the shell.
	machine.Script(t, "helper", "sh -c 'kill -KILL $$'; exit $?")
	if o, err := alone("helper").Run(t.Context()); err != nil || o.Code != 128+9 {
		t.Errorf("%+v, %v", o, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = alone("helper").Run(ctx)
	require.Class(t, err, state.Canceled, "was not started")
}

// What a program leaves behind when it ends is gone with it.
func TestRunLeavesNothing(t *testing.T) {
	line := machine.NewFIFO(t)
	machine.Script(t, "helper", "exec 9>"+line.Path+"\nsetsid sleep 60 &\necho started >&9")
	done := make(chan error, 1)
	go func() {
		_, err := alone("helper").Run(t.Context())
		done <- err
	}()
	line.WaitFor(t, "started")
	require.NoError(t, <-done)
	line.WaitForEnd(t)
}

func TestRunCancelKillsDescendants(t *testing.T) {
	line := machine.NewFIFO(t)
	machine.Script(t, "helper", family(line))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := alone("helper").Run(ctx)
		done <- err
	}()
	line.WaitFor(t, "started")
	cancel()
	require.Class(t, <-done, state.Canceled, "helper was killed")
	line.WaitForEnd(t)
}

func TestRunDiesWithItsParent(t *testing.T) {
	line := machine.NewFIFO(t)
	machine.Script(t, "helper", family(line))
	self, err := os.Executable()
	require.NoError(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), runProgram+"=helper")
	require.NoError(t, parent.Start())
	line.WaitFor(t, "started")
	require.NoError(t, parent.Process.Kill())
	line.WaitForEnd(t)
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended well")
	}
}

// It goes on, and may go on to write, to both of its outputs.
func TestRunOutlivesItsParent(t *testing.T) {
	line, ends := machine.NewFIFO(t), machine.NewFIFO(t)
	machine.Script(t, "helper", "exec 9>"+line.Path+"; echo started >&9; read x <"+ends.Path+"; echo more; echo more >&2; echo done >&9")
	self, err := os.Executable()
	require.NoError(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), runProgram+"=helper", runOutlives+"=1")
	require.NoError(t, parent.Start())
	line.WaitFor(t, "started")
	require.NoError(t, parent.Process.Kill())
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended well")
	}
	require.NoError(t, os.WriteFile(ends.Path, []byte("now\n"), 0))
	line.WaitFor(t, "done")
	line.WaitForEnd(t)
}

// What it writes is kept like that of others.
func TestRunKeepsOutputOfWhatOutlives(t *testing.T) {
	machine.Script(t, "helper", "echo out; echo err >&2; exit 7")
	o, err := Program{Name: "helper", Outlives: true}.Run(t.Context())
	require.NoError(t, err)
	if o.Code != 7 || o.Output != "out; err" {
		t.Errorf("%+v", o)
	}
	var out strings.Builder
	o, err = Program{Name: "helper", Outlives: true, Stdout: &out}.Run(t.Context())
	require.NoError(t, err)
	if o.Output != "err" || out.String() != "out\n" {
		t.Errorf("%+v, and %q", o, out.String())
	}
}

// What is no process of a namespace of its own is killed with what it has started.
func TestRunKillsTheGroup(t *testing.T) {
	line := machine.NewFIFO(t)
	machine.Script(t, "helper", "exec 9>"+line.Path+"; sleep 60 & echo started >&9; echo waiting >&2; sleep 60")
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Program{Name: "helper", Title: "helper change", Outlives: true}.Check(ctx) }()
	line.WaitFor(t, "started")
	cancel()
	require.Class(t, <-done, state.Canceled, "helper change was killed")
	line.WaitForEnd(t)
}
