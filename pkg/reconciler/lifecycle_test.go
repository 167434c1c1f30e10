package reconciler

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func TestLifeOfAMountVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), publish("v", 2, publishReadOnly))
		h.atRest("v")
		before := h.k.changes()
		h.ok(stage("v"), publish("v", 1), publish("v", 2, publishReadOnly))
		h.noStepSince(before)
		h.ok(unpublish("v", 1), unpublish("v", 1), unpublish("v", 2), unstage("v"), unstage("v"))
		h.atRest("v")
		if len(h.store.List()) != 0 {
			t.Error("the record is left")
		}
		h.ok(stage("v"))
		if h.k.formats != 1 {
			t.Errorf("formatted %d times", h.k.formats)
		}
	})
}

func TestLifeOfABlockVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), publish("v", 2, publishBlock, publishReadOnly))
		h.atRest("v")
		record := h.store.Get("v")
		if got := record.Targets[targetPath("v", 1)].Device; got != v.device.number {
			t.Errorf("target 1 remembers device %s, want %s", got, v.device.number)
		}
		if got := record.Targets[targetPath("v", 2)].Device; got != v.view.number {
			t.Errorf("target 2 remembers device %s, want that of the view, %s", got, v.view.number)
		}
		h.ok(unpublish("v", 2))
		synctest.Wait()
		if v.view != nil {
			t.Error("the view is left without a target")
		}
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
		h.ok(stage("v", stageBlock, stageReadOnly), publish("v", 1, publishBlock, publishReadOnly))
		if !v.device.readOnly || v.view != nil {
			t.Error("a read-only stage is the device itself, read-only")
		}
		h.atRest("v")
	})
}

// The renewal is made up for if it failed, or the process died before it.
func TestUnstageReleasesCopies(t *testing.T) {
	faults := map[string]*fault{
		"nothing fails": nil,
		"the unmount succeeds and reports an error": {op: opUnmount, key: stagePath("v"), times: 1, mode: halfway, err: errBoom},
		"the process dies after the unmount":        {op: opUnmount, key: stagePath("v"), times: 1, mode: crashes},
		"the renewal fails":                         {op: opRenew, key: stagePath("v"), times: 1, mode: fails, err: errBoom},
		"the process dies in the renewal":           {op: opRenew, key: stagePath("v"), times: 1, mode: crashes},
	}
	for name, f := range faults {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				v.private = true
				h.ok(stage("v"))
				if f == nil {
					h.ok(unstage("v"))
					h.atRest("v")
					return
				}
				h.k.fault(f)
				if err := h.do(unstage("v")); err == nil {
					t.Error("OK")
				}
				h.revive()
				h.sleep(5 * time.Minute)
				require.NoError(h.t, h.do(unstage("v")))
				h.atRest("v")
			})
		})
	}
}

func (h *harness) dead() (dead bool) {
	h.k.with(func() { dead = h.p.dead })
	return dead
}

// revive starts the next process if this one has died.
func (h *harness) revive() {
	if h.dead() {
		<-h.p.done
		h.start()
	}
}

func TestHeldDeviceNamesItsHolder(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"))
		h.k.with(func() { v.held = true })
		h.refuse(h.do(unstage("v")), state.Unavailable, "volume v", "still held", "pid 7 (holder)")
		h.k.with(func() { v.held = false })
		h.ok(unstage("v"))
		h.atRest("v")
	})
}

// Whoever lets go of the device a moment later, as a container that ends, is waited for.
func TestDeviceIsLetGoSoon(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"))
		h.k.with(func() { v.held = true })
		time.AfterFunc(300*time.Millisecond, func() { h.k.with(func() { v.held = false }) })
		h.ok(unstage("v"))
		h.atRest("v")
	})
}

// Whoever asks whether a device is in use claims it for a moment: a mount waits that
// out, and no longer.
func TestMountWaitsForWhoLooksAtItsDevice(t *testing.T) {
	bubble(t, func(h *harness) {
		busy := fmt.Errorf("mount: %w", unix.EBUSY)
		h.volume("v")
		h.k.fail(opMount, "", 3, busy)
		h.ok(stage("v"), unstage("v"))

		h.k.fail(opMount, "", -1, busy)
		start := time.Now()
		h.refuse(h.do(stage("v")), state.Unavailable, "device or resource busy")
		if took := time.Since(start); took < releaseLimit || took > 2*releaseLimit {
			t.Errorf("it was told after %s", took)
		}
		h.k.mend()
	})
}

func stageLayer(s *state.Stage)    { s.Context = layerContext() }
func publishLayer(t *state.Target) { t.Context = layerContext() }

// Whatever dies or half finishes wherever, the work is finished after it.
func TestEveryStepMayFailHalfwayOrDie(t *testing.T) {
	lives := map[string][]request{
		"mount": {stage("v"), publish("v", 1), publish("v", 2, publishReadOnly), unpublish("v", 1), unpublish("v", 2), unstage("v")},
		"block": {stage("v", stageBlock), publish("v", 1, publishBlock), publish("v", 2, publishBlock, publishReadOnly), resize("v", 2*gib),
			unpublish("v", 1), unpublish("v", 2), unstage("v")},
		"xfs":             {stage("v", stageXFS), publish("v", 1, publishXFS), resize("v", 2*gib), unpublish("v", 1), unstage("v")},
		"disk":            {stage("v"), unstage("v")},
		"layer on a disk": {stage("v", stageXFS, stageLayer), unstage("v")},
		"layer":           {stage("v", stageXFS, stageLayer), publish("v", 1, publishXFS, publishLayer), resize("v", 2*gib), unpublish("v", 1), unstage("v")},
	}
	for life, requests := range lives {
		for _, o := range append(mutators(), trials()...) {
			for _, m := range []mode{fails, halfway, idles, crashes} {
				t.Run(fmt.Sprintf("%s/%s/%d", life, o, m), func(t *testing.T) {
					bubble(t, func(h *harness) {
						v := h.volume("v")
						if v.noted = strings.HasSuffix(life, "disk"); strings.HasPrefix(life, "layer") {
							h.k.with(func() { v.layer = &fakeLayer{} })
						}
						h.k.fault(&fault{op: o, times: 1, mode: m, err: errBoom})
						h.k.fault(&fault{op: o, times: 1, mode: m, err: errBoom})
						for _, r := range requests {
							for try := 0; ; try++ {
								h.p.r.Remember("v", map[string]string{layerKey: rightKey})
								err := h.do(r)
								if err == nil {
									break
								}
								if state.ClassOf(err) != state.Unavailable || try == 5 {
									t.Fatalf("%s: %v", r, err)
								}
								h.revive()
							}
							if lie := h.lie(r); lie != "" {
								t.Fatalf("%s: answered OK, and %s", r, lie)
							}
						}
						h.sleep(10 * time.Minute)
						h.atRest("v")
						if record := h.store.Get("v"); record != nil {
							t.Errorf("a record is left: %s", marshal(record))
						}
					})
				})
			}
		}
	}
}

func TestHooksFailSteps(t *testing.T) {
	for _, moment := range []Moment{Before, After} {
		bubble(t, func(h *harness) {
			h.volume("v")
			failures := 1
			h.hook = func(_ context.Context, volume string, step Step, m Moment) error {
				if volume == "v" && step == (Step{Action: Mount, Part: state.StagePart()}) && m == moment && failures > 0 {
					failures--
					return errBoom
				}
				return nil
			}
			h.restart()
			err := h.do(stage("v"))
			if moment == After { // the step failed, and the stage is seen to be there
				require.NoError(h.t, err)
			} else {
				h.refuse(err, state.Unavailable, "step mount for stage", "boom")
				if !errors.Is(err, errBoom) {
					t.Error("the cause is not wrapped")
				}
			}
			if failures != 0 {
				t.Error("the hook was not called")
			}
			h.ok(stage("v"))
			h.atRest("v")
		})
	}
}

type countingMetrics struct {
	mu            sync.Mutex
	steps, failed int
	backOffs      int
	repairs       []state.PartKind
	retired       int
	longest       time.Duration
	longestAction Action
}

func (c *countingMetrics) Step(action Action, took time.Duration, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.steps++
	if err != nil {
		c.failed++
	}
	if took > c.longest {
		c.longest, c.longestAction = took, action
	}
}

func (c *countingMetrics) BackOff() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.backOffs++
}

func (c *countingMetrics) Repair(kind state.PartKind) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.repairs = append(c.repairs, kind)
}

func (c *countingMetrics) Retire() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.retired++
}

func TestMetricsCount(t *testing.T) {
	bubble(t, func(h *harness) {
		m := &countingMetrics{}
		h.metrics = m
		h.restart()
		h.volume("v")
		h.k.slow(opFormat, "v", 1, 7*time.Second)
		h.k.fail(opBind, "", 1, errBoom)
		h.ok(stage("v"))
		if m.backOffs != 0 {
			t.Errorf("%d back-offs without a failure", m.backOffs)
		}
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		synctest.Wait()
		h.ok(publish("v", 1))
		if m.steps != 6 || m.failed != 1 || m.backOffs != 1 || m.longest != 7*time.Second || m.longestAction != Format {
			t.Errorf("%+v", m)
		}
	})
}

// A volume at rest has no goroutine, no timer, and is not looked at.
func TestNothingHappensAtRest(t *testing.T) {
	looks := func(h *harness) (n int) {
		h.k.with(func() {
			for _, calls := range h.k.calls {
				n += calls
			}
		})
		return n
	}
	bubble(t, func(h *harness) {
		for i := range 50 {
			id := fmt.Sprintf("v%d", i)
			h.volume(id)
			h.ok(stage(id), publish(id, 1))
		}
		synctest.Wait()
		stacks := make([]byte, 1<<20)
		stacks = stacks[:runtime.Stack(stacks, true)]
		if strings.Contains(string(stacks), ".converge(") {
			t.Errorf("a worker is left:\n%s", stacks)
		}
		before := looks(h)
		h.sleep(24 * time.Hour)
		if n := looks(h) - before; n != 0 {
			t.Errorf("%d calls at rest", n)
		}
	})
	bubble(t, func(h *harness) { // a retry that ends a back-off early leaves one wake-up at most
		h.volume("v")
		h.ok(stage("v"))
		f := h.k.fail(opBind, "", -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.sleep(time.Hour)
		h.k.with(func() { f.times = 0 })
		h.ok(publish("v", 1))
		synctest.Wait()
		before := h.k.count(opFind, "v")
		h.sleep(24 * time.Hour)
		if n := h.k.count(opFind, "v") - before; n > 1 {
			t.Errorf("%d looks at rest", n)
		}
	})
}
