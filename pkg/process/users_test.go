package process

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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
	for range InOtherNamespaces(func(proc string) (string, bool) {
		if !slices.Contains(both, proc) {
			return "", false
		}
		if asked++; asked > 1 {
			return "/found", true
		}
		pid, err := strconv.Atoi(filepath.Base(proc))
		require.NoError(t, errors.Join(err, unix.Kill(pid, unix.SIGKILL)))
		if pid == cmd.Process.Pid {
			_ = cmd.Wait()
		}
		for proc := proc; err == nil; { // a zombie of init has no namespace either
			_, err = os.Readlink(proc + "/ns/mnt")
		}
		return "", false
	}) {
		return
	}
	t.Errorf("the namespace was asked %d times", asked)
}
