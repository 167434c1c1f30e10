package reconciler

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Who asks has an attempt made at once, also at what the call waits for, and one only.
func TestCallEndsBackOff(t *testing.T) {
	for name, row := range map[string]struct {
		before []request
		fails  op
		of     Action
		begun  request // what backs off
		call   request
		words  string
	}{
		"a retry":                   {[]request{stage("v")}, opBind, Bind, publish("v", 1), publish("v", 1), "boom"},
		"a publish, of its stage":   {nil, opMount, Mount, stage("v"), publish("v", 1), "target " + targetPath("v", 1) + " waits for stage"},
		"an unstage, of its target": {[]request{stage("v"), publish("v", 1)}, opUnmount, Unbind, unpublish("v", 1), unstage("v"), "stage waits for target"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				times := h.attempts(row.of)
				h.volume("v")
				h.ok(row.before...)
				h.k.fail(row.fails, "", -1, errBoom)
				h.refuse(h.do(row.begun), state.Unavailable)
				h.sleep(time.Hour)
				before := len(*times)
				h.refuse(h.got(h.begin(row.call)), state.Unavailable, "volume v", row.words, "boom")
				if n := len(*times) - before; n != 1 {
					t.Errorf("%d attempts, want 1", n)
				}
				h.k.mend()
				h.atOnce(func() { h.ok(row.call) })
				h.atRest("v")
			})
		})
	}
}

// The retry comes while the worker looks at the volume after a failed attempt:
// it must be answered by that failure or by a new attempt, not by its deadline.
func TestRetryDuringTheLookAfterAFailureKicks(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, "", 12, errBoom)
		h.k.slow(opFind, "v", -1, 10*time.Millisecond)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		bind := func() int { return h.k.count(opBind, targetPath("v", 1)) }
		for bind() < 11 { // now the back-off is two minutes
			h.sleep(time.Millisecond)
		}
		answer := h.begin(publish("v", 1))
		h.sleep(time.Second)
		h.refuse(h.got(answer), state.Unavailable, "boom")
		h.ok(publish("v", 1))
	})
}

func TestStepInBackOffWaits(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, targetPath("v", 1), -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.ok(publish("v", 2), publish("v", 3))
		h.wantCalls(1, opBind, targetPath("v", 1))
	})
}

func TestFailuresTogetherComeBackApart(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Bind)
		const volumes = 8
		h.k.fail(opBind, "", -1, errBoom)
		for i := range volumes {
			id := string(rune('a' + i))
			h.volume(id)
			h.ok(stage(id))
			h.refuse(h.do(publish(id, 1)), state.Unavailable)
		}
		h.sleep(600 * time.Millisecond)
		if len(*times) != 2*volumes {
			t.Fatalf("%d attempts, want two of each volume", len(*times))
		}
		first, second := (*times)[:volumes], (*times)[volumes:]
		if !first[0].Equal(first[volumes-1]) {
			t.Fatal("they did not fail together")
		}
		if second[0].Equal(second[volumes-1]) {
			t.Error("they all came back at the same moment")
		}
	})
}

// The back-off of one part is not another's, nor the volume's.
func TestEachPartIsDueOnItsOwn(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, "", -1, errBoom)
		old, young := targetPath("v", 1), targetPath("v", 2)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.sleep(time.Hour)
		for before := h.k.count(opBind, old); h.k.count(opBind, old) == before; {
			h.sleep(time.Second)
		}
		h.refuse(h.do(publish("v", 2)), state.Unavailable)
		h.sleep(2 * time.Second)
		if n := h.k.count(opBind, young); n < 3 {
			t.Errorf("%d attempts in two seconds, beside a part that waits for minutes", n)
		}
	})
}

// attempts returns when steps with the action began.
func (h *harness) attempts(action Action) *[]time.Time {
	var mu sync.Mutex
	times := &[]time.Time{}
	h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
		mu.Lock()
		defer mu.Unlock()
		if step.Action == action && moment == Before {
			*times = append(*times, time.Now())
		}
		return nil
	}
	h.restart()
	return times
}

// backsOff checks that attempts come after 0.5 s·2^n, at most two minutes, give
// or take the jitter of a fifth.
func backsOff(t *testing.T, times []time.Time, atLeast int) {
	t.Helper()
	if len(times) < atLeast {
		t.Errorf("%d attempts, want %d or more", len(times), atLeast)
	}
	delay := 500 * time.Millisecond
	for i := 1; i < len(times); i++ {
		if gap := times[i].Sub(times[i-1]); gap < delay*8/10 || gap > delay*12/10 {
			t.Fatalf("attempt %d came %s after the one before, want about %s", i+1, gap, delay)
		}
		delay = min(2*delay, 2*time.Minute)
	}
}

func TestFailedStepBacksOff(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Bind)
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, "", -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.sleep(time.Hour)
		backsOff(t, *times, 30)
	})
}

// What cannot be had is looked at every other minute. A part that waits for another
// has no back-off of its own that could run out: its last failure makes no worker spin.
func TestStuckPartIsLookedAtSeldom(t *testing.T) {
	turnReadOnly := func(h *harness) { h.k.with(func() { h.k.volumes["v"].superRO = true }) }
	for name, row := range map[string]struct {
		begin       func(h *harness)
		least, most int // looks in an hour
	}{
		"the look fails": {func(h *harness) {
			h.k.fail(opFind, "v", -1, errBoom)
			h.refuse(h.do(stage("v")), state.Unavailable, "volume v", "observe", "boom")
		}, 30, 60},
		"the stage is stuck": {func(h *harness) {
			h.ok(stage("v"), publish("v", 1))
			turnReadOnly(h)
		}, 20, 60},
		"a target that failed waits for a stuck stage": {func(h *harness) {
			h.ok(stage("v"), publish("v", 1))
			turnReadOnly(h)
			h.k.fail(opFind, "v", 1, errBoom) // fails all parts, the target too
		}, 20, 60},
		"a target that failed waits for a stage that fails": {func(h *harness) {
			h.ok(stage("v"))
			h.k.fail(opBind, "", 1, errBoom)
			h.refuse(h.do(publish("v", 1)), state.Unavailable)
			h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
			h.k.fail(opMount, "", -1, errBoom)
		}, 20, 120},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				row.begin(h)
				h.wake("v")
				before := h.k.count(opFind, "v")
				h.sleep(time.Hour)
				if n := h.k.count(opFind, "v") - before; n < row.least || n > row.most {
					t.Errorf("%d looks in an hour", n)
				}
				h.k.mend()
				h.k.with(func() { v.superRO = false })
				h.sleep(3 * time.Minute)
				h.atRest("v")
			})
		})
	}
}

func TestStepThatChangesNothingFailsAndBacksOff(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Bind)
		h.volume("v")
		h.ok(stage("v"))
		f := h.k.fault(&fault{op: opBind, times: -1, mode: idles})
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "volume v", "bind", "changed nothing")
		h.sleep(time.Minute)
		backsOff(t, *times, 6)
		h.k.with(func() { f.times = 0 })
		h.ok(publish("v", 1))
		h.atRest("v")
	})
}

// Steps that undo each other are bounded too.
func TestStepsThatUndoEachOtherAreBounded(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
			if step.Action == Mount && moment == After {
				h.k.with(func() {
					delete(h.k.mounts, stagePath("v"))
					h.k.volumes["v"].contents.NeedsCheck = true
				})
			}
			return nil
		}
		h.restart()
		h.refuse(h.do(stage("v")), state.Unavailable, "steps in one pass")
		h.hook = nil
		h.restart()
		h.ok(stage("v"))
		h.atRest("v")
	})
}

// The step that drops an idle view is nobody's: it backs off like any other,
// and no wake-up in between makes it forgotten.
func TestIdleViewIsDroppedWithBackOff(t *testing.T) {
	begin := func(h *harness) *fakeVolume {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly))
		return v
	}
	bubble(t, func(h *harness) {
		times := h.attempts(DetachView)
		begin(h)
		h.k.fail(opDetachView, "v", -1, errBoom)
		h.ok(unpublish("v", 1))
		h.sleep(time.Hour)
		backsOff(t, *times, 30)
	})
	bubble(t, func(h *harness) {
		v := begin(h)
		h.k.fail(opDetachView, "v", 2, errBoom)
		h.ok(unpublish("v", 1))
		h.wakeInBackOff("v")
		h.sleep(10 * time.Minute)
		if v.view != nil {
			t.Error("the view is forgotten")
		}
		h.atRest("v")
	})
}

// wakeInBackOff wakes a volume, of which a step failed just now, twice before
// the step is due again.
func (h *harness) wakeInBackOff(id string) {
	h.sleep(300 * time.Millisecond)
	h.wake(id)
	h.wake(id)
}
