package lvm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func program(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "lvm")
	machine.WriteProgram(t, path, "#!/bin/sh\n"+text)
	return path
}

func TestRun(t *testing.T) {
	ctx := t.Context()
	out, err := newRunner(program(t, `echo "$DM_DISABLE_UDEV $1"; echo warning >&2`), time.Minute)(ctx, "lvs")
	if err != nil || string(out) != "1 lvs\n" {
		t.Errorf("%q, %v", out, err)
	}
	_, err = newRunner(program(t, `echo "  not here" >&2; exit 5`), time.Minute)(ctx, "lvs")
	require.Class(t, err, state.Unavailable, "lvm lvs", "not here")
	_, err = newRunner("no-such-program", time.Minute)(ctx, "lvs")
	require.Class(t, err, state.FailedPrecondition, "install lvm2")
}

// An lvm that hangs is killed, and what it has started with it.
func TestRunHangs(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "alive")
	require.NoError(t, os.WriteFile(pipe, nil, 0o600))
	hanging := program(t, `echo waiting >&2; (exec 3<"`+pipe+`"; sleep 3600) & sleep 3600`)
	limit, err := 200*time.Millisecond, error(nil)
	for ; ; limit *= 4 { // the program may not have begun in time
		if _, err = newRunner(hanging, limit)(t.Context(), "lvchange"); strings.Contains(fmt.Sprint(err), "waiting") || limit > 10*time.Second {
			break
		}
	}
	require.Class(t, err, state.DeadlineExceeded, "lvm lvchange was killed", "waiting", fmt.Sprint("it had not ended after ", limit))
	for since := time.Now(); ; {
		alive := openers(t, pipe)
		if len(alive) == 0 {
			return
		}
		if time.Since(since) > 5*time.Second { // those that were killed close their files one by one
			t.Fatalf("what it has started lives: %q", alive)
		}
	}
}

// openers returns the descriptors by which processes have a file open.
func openers(t *testing.T, path string) (found []string) {
	t.Helper()
	entries, err := filepath.Glob("/proc/[0-9]*/fd/3")
	require.NoError(t, err)
	for _, entry := range entries {
		if to, err := os.Readlink(entry); err == nil && to == path {
			found = append(found, entry)
		}
	}
	return found
}
