package driver

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// All threads of a plugin that serves have coarse timers, Go's monitor thread too.
func TestTimersAreRelaxed(t *testing.T) {
	machine.Kernel(t)
	relaxTimers()
	tasks, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	for _, task := range tasks {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%s/timerslack_ns", task.Name()))
		if os.IsNotExist(err) || errors.Is(err, unix.ESRCH) { // it has ended
			continue
		}
		if want := fmt.Sprint(timerSlack.Nanoseconds()); err != nil || strings.TrimSpace(string(raw)) != want {
			t.Errorf("thread %s: %q (%v), want %s", task.Name(), raw, err, want)
		}
	}
	if slack, err := unix.PrctlRetInt(unix.PR_GET_TIMERSLACK, 0, 0, 0, 0); err != nil || int64(slack) != timerSlack.Nanoseconds() {
		t.Errorf("the kernel says %d (%v)", slack, err)
	}
}
