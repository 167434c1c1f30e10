package driver

import (
	"os"
	"path/filepath"
	"strconv"
	"time"
)

// timerSlack is how late a timer of the plugin's threads may be.
const timerSlack = time.Millisecond

// relaxTimers lets the timers of all threads be late (PR_SET_TIMERSLACK of prctl(2)); those
// that are made later inherit it. While anything runs, the monitor thread of Go's runtime
// wakes each 20 µs, and 50 µs of slack are the default: on a small virtual machine that is
// a sixth of the plugin's processor time, and delays each call. A thread that cannot be
// changed, which needs CAP_SYS_NICE, stays as it is.
func relaxTimers() {
	slack := []byte(strconv.FormatInt(timerSlack.Nanoseconds(), 10))
	for done, more := map[string]bool{}, true; more; { // one that is made meanwhile may inherit the default
		more = false
		threads, _ := filepath.Glob("/proc/self/task/*")
		for _, thread := range threads {
			if id := filepath.Base(thread); !done[id] {
				done[id], more = true, true
				_ = os.WriteFile(filepath.Join("/proc", id, "timerslack_ns"), slack, 0)
			}
		}
	}
}
