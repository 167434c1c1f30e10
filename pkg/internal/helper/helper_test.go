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
const family = "setsid sh -c 'sleep 60 & sleep 60' &\necho started >&9\nwait"

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

// What a program has started is gone with it, however it ends.
func TestRunLeavesNothing(t *testing.T) {
	for name, row := range map[string]struct {
		program Program
		script  string
		killed  string // the words for that; empty: it ends
	}{
		"ends":   {alone("helper"), "setsid sleep 60 &\necho started >&9", ""},
		"killed": {alone("helper"), family, "helper was killed"},
		"killed without a namespace of its own": {
			Program{Name: "helper", Title: "helper change", Outlives: true},
			"sleep 60 & echo started >&9; echo waiting >&2; sleep 60", "helper change was killed",
		},
	} {
		t.Run(name, func(t *testing.T) {
			line := machine.NewFIFO(t)
			machine.Script(t, "helper", "exec 9>"+line.Path+"\n"+row.script)
			ctx, kill := context.WithCancel(t.Context())
			defer kill()
			done := make(chan error, 1)
			go func() { done <- row.program.Check(ctx) }()
			line.WaitFor(t, "started")
			if row.killed == "" {
				require.NoError(t, <-done)
			} else {
				kill()
				require.Class(t, <-done, state.Canceled, row.killed)
			}
			line.WaitForEnd(t)
		})
	}
}

func TestRunDiesWithItsParent(t *testing.T) {
	line := machine.NewFIFO(t)
	machine.Script(t, "helper", "exec 9>"+line.Path+"\n"+family)
	killParent(t, line, runProgram+"=helper")
	line.WaitForEnd(t)
}

// killParent makes a process run the program, and kills it when the program has started.
func killParent(t *testing.T, line *machine.FIFO, env ...string) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	parent := exec.Command(self)
	parent.Env = append(os.Environ(), env...)
	require.NoError(t, parent.Start())
	line.WaitFor(t, "started")
	require.NoError(t, parent.Process.Kill())
	if err := parent.Wait(); err == nil {
		t.Error("the parent ended well")
	}
}

// It goes on, and may go on to write, to both of its outputs.
func TestRunOutlivesItsParent(t *testing.T) {
	line, ends := machine.NewFIFO(t), machine.NewFIFO(t)
	machine.Script(t, "helper", "exec 9>"+line.Path+"; echo started >&9; read x <"+ends.Path+"; echo more; echo more >&2; echo done >&9")
	killParent(t, line, runProgram+"=helper", runOutlives+"=1")
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
