package reconciler

import (
	"flag"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/csi-node/csi-node/test/require"
)

var (
	countFlag  = flag.Int("histories.count", 3000, "how many random histories to play")
	firstFlag  = flag.Uint64("histories.seed", 0, "seed of the first one")
	replayFlag = flag.String("histories.replay", "", "a history to play instead, as a failure prints it")
)

// recorder takes the place of a test in a history that may fail.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	failures []string
}

// stopped is what a fatal failure panics with.
type stopped struct{}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) Error(args ...any)                 { r.Errorf("%s", fmt.Sprint(args...)) }
func (r *recorder) Fatal(args ...any)                 { r.Error(args...); panic(stopped{}) }
func (r *recorder) Fatalf(format string, args ...any) { r.Errorf(format, args...); panic(stopped{}) }

// verdict is what became of one history.
type verdict struct {
	failures []string
	story    string
}

// failed is everything that was wrong, one thing a line.
func (v verdict) failed() string {
	failures := slices.Compact(slices.Clone(v.failures))
	return strings.Join(failures[:min(len(failures), 10)], "\n")
}

// try plays a history and judges it. plant, which may be nil, puts a fault of the
// plugin's into its kernel. The test itself does not fail.
func try(t *testing.T, history []operation, plant func(*process, Kernel) Kernel) (v verdict) {
	r := &recorder{TB: t}
	var k *fakeKernel
	defer func() {
		if p := recover(); p != nil { // a deadlock of the bubble
			r.Errorf("%v", p)
		}
		v = verdict{r.failures, k.story()}
	}()
	synctest.Test(t, func(t *testing.T) {
		h := &harness{t: r, k: newFakeKernel(), store: newFakeStore(), plant: plant}
		k = h.k
		defer func() {
			if p := recover(); p != nil && p != (stopped{}) {
				panic(p)
			}
			h.k.mend()
			if h.p != nil {
				h.stop()
			}
			r.failures = append(r.failures, h.k.violations...)
		}()
		h.play(history)
	})
	return v
}

// TestHistories plays random histories. When one fails it prints the shortest
// that fails, and how to play that again.
func TestHistories(t *testing.T) {
	if *replayFlag != "" {
		replay(t, *replayFlag)
		return
	}
	var next, played atomic.Uint64
	next.Store(*firstFlag)
	last := *firstFlag + uint64(*countFlag)
	for range runtime.GOMAXPROCS(0) {
		t.Run("", func(t *testing.T) {
			t.Parallel()
			for seed := next.Add(1) - 1; seed < last && !t.Failed(); seed = next.Add(1) - 1 {
				history := generate(seed)
				if v := try(t, history, nil); len(v.failures) > 0 {
					next.Store(last)
					describeFailure(t, seed, history, v)
				}
				if n := played.Add(1); n%10000 == 0 {
					t.Logf("%d histories", n)
				}
			}
		})
	}
}

// Each of these showed a fault of the plugin's once.
func TestHistoriesOfFaults(t *testing.T) {
	for fault, text := range map[string]string{
		"an unpublish that a call of another part ended was told OK, whatever was left there": "delays 162032989; volume a blank; publish a 3; publish a 3; unpublish a 2; cover a 2; unstage a; sleep 8ms",
		"an adopted stage was not looked at":                                                  "volume b blank; stage b block ro; stop; lose-store; publish b 2 block",
		"a publish was refused for good, and stood":                                           "volume a ext4; dirty a; fault check a 2 halfway 4 0s; stage a; publish a 3; cover a 0; stage a; publish a 3",
		"a stage that was refused made the plugin forget the unstage before it":               "volume a blank; stage a; cover a 0; unstage a; stage a",
		"who holds an unstaged device was not told":                                           "volume a blank; stage a block; publish a 2 block; cover a 0; kill; lose-store; unstage a",
		"an unpublish was told the end of a publish that had been refused":                    "delays 949801784; volume a ext4; stage a; sleep 2ms; litter a 2; fault find a 2 works 3 0s; fault find a 1 fails 2 0s; kill; publish a 2; await; kill; unpublish a 2",
		"a device on its way out that lacks a growth was taken for a truncated volume":        "volume a blank; fault grow-device a 2 halfway 3 0s; stage a; grow a 4; losetup-d a",
		"a stage that was not accepted took the device from under a target of no record":      "delays 798042002; volume a blank; publish a 3 block; unpublish a 1; stage a block; sleep 200ms; kill; lose-store; unstage a; stage a",
		"the judge took a look that came after an answer for the one that it was of":          "volume b blank; stage b xfs; fault probe b 2 idles 3 8ns; stage b xfs; cover b 0; await",
		"a layer that strayed was closed beneath a target of no record":                       "volume a blank layer; stage a block; publish a 2 block; unplug a; stop; lose-store; stage a",
		"a layer that strayed was closed beneath its view":                                    "volume a blank layer; stage a block; publish a 2 block ro; unplug a; unpublish a 2; sleep 1s; unstage a",
		"a stage was adopted whose device was on its way out beneath a layer":                 "volume a blank layer; stage a block; losetup-d a; kill; lose-store; publish a 2 block",
		"the making of a layer went on for a read-only stage":                                 "volume b blank layer; fault end-format b 0 crashes 2 0s; stage b; stage b ro",
		"a wrong key was tried over and over on a layer on its way out":                       "volume b blank layer; stage b; stage b badkey; layer-d b",
		"the judge took a look that the worker went on to for the one that an answer was of":  "delays 442981690; volume a blank; unstage a; await; publish a 3; publish a 2; unpublish a 2; stage a block; unpublish a 1; publish a 3 block; sleep 30µs; sleep 9ms; grow a 1; publish a 2 block; losetup-d a",
		"the judge took a target of a record that was lost for one of a lower device":         "reuse; volume a blank layer; stage a block; publish a 3 block; kill; losetup-d a; lose-store; layer-d a; others 1; stage a",
		"a stage was seen with what had come in the place of its mounted disk":                "delays 935204318; volume b blank; stage b; fault mount b 0 crashes 2 0s; sleep 80ms; swap b; publish b 2; sleep 30ms; umount b 0",
		"a lost record made that of another disk than the mounted one":                        "volume a blank; stage a open; swap a; unstage a; stage a; stop; lose-store; swap a; stage a; umount a 0",
		"an open layer on a device that does not bear it was told to be held":                 "delays 140627056; volume a blank layer; stage a block; sleep 80ms; swap a; unstage a; stage a block",
		"the judge took a target of which nobody was told for one that stays":                 "volume a blank; fault end-format a 0 halfway 1 0s; fault erase a 0 halfway 1 0s; stage a; publish a 2; sleep 1s; stage a single",
		"the worker spun while a target of a broken file system backed off":                   "volume a blank; stage a; publish a 2; sleep 7s; fault find-view a 0 fails 3 0s; unpublish a 3; grow a 4; die a; retry a; publish a 1",
		"the worker spun while a target backed off whose stage was to be repaired":            "volume a blank; stage a xfs; umount a 0; publish a 1 xfs; twice a 0; fault find a 1 fails 3 0s; unpublish a 2; die a",
		"a stage that was asked for once it was adopted remembered no device":                 "delays 988489766; volume a ext4; publish a 1; sleep 8ms; stage a; publish a 3; await; kill; lose-store; publish a 3 single; sleep 3ms; sleep 4ms; stage a",
		"a volume was formatted that a target of no record showed":                            "volume b blank; stage b block; publish b 3 block ro; stop; lose-store; stage b",
	} {
		t.Run(fault, func(t *testing.T) { replay(t, text) })
	}
}

func replay(t *testing.T, text string) {
	history, err := parse(text)
	require.NoError(t, err)
	v := try(t, history, nil)
	t.Logf("the story:\n%s", v.story)
	if len(v.failures) > 0 {
		t.Error(v.failed())
	}
}

// describeFailure prints the shortest history that fails.
func describeFailure(t *testing.T, seed uint64, history []operation, v verdict) {
	t.Helper()
	short := shrink(history, func(h []operation) bool {
		for range 2 { // for the scheduler has a word in what happens at one moment
			if len(try(t, h, nil).failures) > 0 {
				return true
			}
		}
		return false
	})
	if again := try(t, short, nil); len(again.failures) > 0 {
		v = again
	}
	var lines strings.Builder
	for _, o := range short {
		fmt.Fprintf(&lines, "\t%s\n", o)
	}
	t.Errorf("seed %d:\n%s\nthe shortest history that fails, of %d operations:\n%s\nto play it again:\n\tgo test ./pkg/reconciler -run 'TestHistories$' -histories.replay '%s'\n\nthe story:\n%s",
		seed, v.failed(), len(short), &lines, script(short), v.story)
}
