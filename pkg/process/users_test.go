package process

import (
	"bufio"
	"errors"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// A search that hangs is left behind, with what it has found.
func TestCollectLeavesASearchThatHangs(t *testing.T) {
	release := make(chan struct{})
	defer close(release)
	found, complete := Collect(t.Context(), time.Second, t.Name(), func(yield func(string) bool) {
		if yield("first") {
			<-release
		}
	})
	if complete || !slices.Equal(found, []string{"first"}) {
		t.Errorf("%q, complete %t", found, complete)
	}
}

// A search is over when it has as many names as an error text should have.
func TestCollectIsBounded(t *testing.T) {
	found, complete := Collect(t.Context(), time.Second, t.Name(), func(yield func(string) bool) {
		for yield("again") {
		}
	})
	if !complete || len(found) != NameLimit {
		t.Errorf("%d names, complete %t", len(found), complete)
	}
}

// What a pod chose, the name of a program or a path in its own mount namespace, does not reach
// a terminal or break a line of the log.
func TestNamesThatAPodChose(t *testing.T) {
	const bad = "a\n\x1b[1m\xffz"
	sleep, err := exec.LookPath("sleep")
	require.NoError(t, err)
	program := filepath.Join(t.TempDir(), bad)
	text, err := os.ReadFile(sleep)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(program, text, 0o700))
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", program, "1000")
	require.NoError(t, cmd.Start())
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	proc := fmt.Sprint("/proc/", cmd.Process.Pid)
	for comm := ""; comm != bad+"\n"; time.Sleep(time.Millisecond) { // until it is started, in its namespace
		read, err := os.ReadFile(proc + "/comm")
		require.NoError(t, err)
		comm = string(read)
	}
	want := fmt.Sprintf("%d (a??[1m?z)", cmd.Process.Pid)
	if got := Name(cmd.Process.Pid); got != "process "+want {
		t.Errorf("%q, want %q at its end", got, want)
	}
	for name := range InOtherNamespaces(func(of string) (string, bool, error) { return "/mnt/" + bad, of == proc, nil }) {
		if want := "pid " + want + " with a mount at /mnt/a??[1m?z in its own mount namespace"; name != want {
			t.Errorf("%q, want %q", name, want)
		}
		return
	}
	t.Error("the process was not found")
}

// A namespace whose first process has ended when it is asked is looked at by another one's.
func TestNamespaceOfAProcessThatEnds(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", "sleep 1000 & echo $!; exec sleep 1000")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var child int
	_, err = fmt.Fscan(out, &child)
	require.NoError(t, err)
	both := []string{fmt.Sprint("/proc/", cmd.Process.Pid), fmt.Sprint("/proc/", child)}
	defer func() {
		_, _ = unix.Kill(child, unix.SIGKILL), cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	asked := 0
	for range InOtherNamespaces(func(proc string) (string, bool, error) {
		if !slices.Contains(both, proc) {
			return "", false, nil
		}
		if asked++; asked > 1 {
			return "/found", true, nil
		}
		pid, err := strconv.Atoi(filepath.Base(proc))
		require.NoError(t, errors.Join(err, unix.Kill(pid, unix.SIGKILL)))
		if pid == cmd.Process.Pid {
			_ = cmd.Wait()
		}
		for proc := proc; err == nil; { // a zombie of init has no namespace either
			_, err = os.Readlink(proc + "/ns/mnt")
		}
		return "", false, os.ErrProcessDone
	}) {
		return
	}
	t.Errorf("the namespace was asked %d times", asked)
}

// A namespace whose mounts cannot be read may have any.
func TestMountsThatCannotBeRead(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c", "echo ready; exec sleep 1000")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() { _, _ = cmd.Process.Kill(), cmd.Wait() }()
	_, err = fmt.Fscanln(out, new(string))
	require.NoError(t, err)
	proc := fmt.Sprint("/proc/", cmd.Process.Pid)
	for title, names := range map[string]iter.Seq[string]{
		"mounts": InOtherNamespaces(func(of string) (string, bool, error) {
			if of == proc {
				return "", false, bufio.ErrTooLong
			}
			return "", false, nil
		}),
		"users": Users(state.DeviceNumber{Minor: 1 << 19}, func(of string) ([]Mount, error) {
			if of == proc {
				return nil, bufio.ErrTooLong
			}
			return nil, nil
		}),
	} {
		found := slices.Collect(names)
		if len(found) != 1 || !strings.HasPrefix(found[0], fmt.Sprintf("pid %d (", cmd.Process.Pid)) || !strings.HasSuffix(found[0], ") with mounts that cannot be read") {
			t.Errorf("%s: %q", title, found)
		}
	}
}
