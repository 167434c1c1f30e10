// Package bench measures what volumes cost with the built plugin, beside other drivers
// of the same volumes in the same run, and writes docs/performance.md:
//
//	make bench
//
// Begin with TestPerformance. The other drivers are in peer_test.go, what is called and
// timed in load_test.go, for what the time is needed in profile_test.go (system calls) and
// cpu_test.go and memory_test.go, the crowded nodes in crowd_test.go, the report in report_test.go.
package bench

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var reportDir = flag.String("bench.report", "", "measure at length, and write performance.md and its charts into this directory; "+
	"without it everything is measured as briefly as can be, to see that it works")

func TestMain(m *testing.M) {
	if name := os.Getenv(peerVariable); name != "" {
		if err := servePeer(name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// The first Ctrl-C lets the tests clean up, the second one does not.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop)
	interrupted = ctx
	harness.Main(m)
}

// interrupted ends when somebody interrupts the benchmark.
var interrupted = context.Background()

func wasInterrupted() bool { return interrupted.Err() != nil }

// scale is how much is measured.
type scale struct {
	rounds      int // each driver in turn, so often; ratios are made in a round
	cycles      int // of one caller in a round
	busyCycles  int // of many callers in a round
	callers     []int
	mounts      int // other mounts on the node
	loops       int // other loop devices on the node
	held        []int
	repairs     int
	profiled    int // cycles of each driver
	idle        time.Duration
	repairsOnce int // volumes that lose their stages at once, at most
}

var (
	long  = scale{5, 30, 64, []int{1, 8, 32}, 10_000, 500, []int{10, 1000, 5000}, 10, 100, time.Minute, 1000}
	short = scale{1, 1, 2, []int{2}, 3, 2, []int{4}, 1, 1, 10 * time.Millisecond, 2}
)

// The names of those who are measured.
const (
	floorName = "floor"
	bareName  = "bare"
	oursName  = "csi-node"
	usualName = "usual"
)

// TestPerformance measures everything, and writes the report.
func TestPerformance(t *testing.T) {
	how, dir := short, t.TempDir()
	if *reportDir != "" {
		how, dir = long, *reportDir
		require.NoError(t, os.MkdirAll(dir, 0o750)) // or minutes of measuring would be lost
		machine.RemoveNewLoops(t)
	}
	r := &report{scale: how, machine: machineFacts(t)}
	for _, part := range []struct {
		what string
		do   func(*testing.T, *report)
	}{
		{"each call, by one caller", measureCalls},
		{"whole lives, by many callers", measureCycles},
		{"programs that are started", countPrograms},
		{"what a cycle asks of processor and kernel", profileCycles},
		{"for what the plugin needs the processor", profileProcessor},
		{"nodes with much else on them", measureCrowds},
		{"volumes held", measureHeld},
		{"for what the plugin needs memory", profileMemory},
	} {
		t.Run(part.what, func(t *testing.T) {
			progress("%s", part.what)
			part.do(t, r)
		})
		if t.Failed() {
			return
		}
	}
	require.NoError(t, r.write(dir))
	progress("written to %s/performance.md", dir)
}

var began = time.Now()

// progress tells a person who waits how far it is.
func progress(format string, args ...any) {
	if *reportDir != "" {
		fmt.Fprintf(os.Stderr, "%5.0f s  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
}
