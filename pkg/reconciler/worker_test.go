package reconciler

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestLifeOfAMountVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), publish("v", 2, publishReadOnly))
		h.atRest("v")
		before := h.k.changes()
		h.ok(stage("v"), publish("v", 1), publish("v", 2, publishReadOnly))
		if h.k.changes() != before {
			t.Error("a repeat took steps")
		}
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

// A pod keeps the device number: a publish of another number is reported, not healed.
func TestBlockTargetOfAnotherNumberIsReported(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock))
		h.k.with(func() { v.device = nil }) // somebody ran losetup -d
		h.wake("v")
		h.refuse(h.do(publish("v", 1, publishBlock)), state.FailedPrecondition, "restart the pod", "7:1", "7:2")
		h.ok(unpublish("v", 1), publish("v", 1, publishBlock))
		h.atRest("v")
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

func TestFailedLookBacksOff(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opFind, "v", -1, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable)
		h.sleep(time.Hour)
		if n := h.k.count(opFind, "v"); n < 30 || n > 60 {
			t.Errorf("%d looks in an hour", n)
		}
		h.k.mend()
		h.ok(stage("v"))
		h.atRest("v")
	})
}

func TestStuckPartIsLookedAtSeldom(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.with(func() { v.superRO = true })
		h.wake("v")
		before := h.k.count(opFind, "v")
		h.sleep(time.Hour)
		if n := h.k.count(opFind, "v") - before; n < 20 || n > 60 {
			t.Errorf("%d looks in an hour", n)
		}
		h.k.with(func() { v.superRO = false })
		h.sleep(3 * time.Minute)
		h.atRest("v")
	})
}

// What stood in the way is gone: the next look heals, back-off or not.
func TestStuckPartIsHealedByTheNextLook(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.with(func() {
			h.k.mounts[targetPath("v", 1)] = []fakeMount{{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}}
		})
		h.restart()
		h.sleep(time.Hour)
		h.k.with(func() { delete(h.k.mounts, targetPath("v", 1)) })
		h.wake("v")
		h.atRest("v")
	})
}

// A part that waits for another has no back-off of its own that could run out:
// its last failure must not make the worker spin.
func TestWaitingPartDoesNotSpin(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.with(func() { v.superRO = true })
		h.k.fail(opFind, "v", 1, errBoom) // fails all parts, the target too
		h.wake("v")
		before := h.k.count(opFind, "v")
		h.sleep(time.Hour)
		if n := h.k.count(opFind, "v") - before; n > 60 {
			t.Errorf("%d looks in an hour", n)
		}
	})
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, "", 1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
		h.k.fail(opMount, "", -1, errBoom)
		h.wake("v")
		before := h.k.count(opFind, "v")
		h.sleep(time.Hour)
		if n := h.k.count(opFind, "v") - before; n > 120 {
			t.Errorf("%d looks in an hour", n)
		}
	})
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

func TestOneTargetsFailureBlocksNoOther(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, targetPath("v", 1), -1, errBoom)
		h.k.fail(opUnmount, targetPath("v", 2), 9, errBoom)
		h.k.fail(opRemove, targetPath("v", 3), 9, errBoom)
		h.ok(publish("v", 2), publish("v", 3))
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.refuse(h.do(unpublish("v", 2)), state.Unavailable)
		h.refuse(h.do(unpublish("v", 3)), state.Unavailable)
		h.k.fail(opLook, targetPath("v", 4), -1, errBoom)
		h.refuse(h.do(publish("v", 4)), state.Unavailable)
		start := time.Now()
		h.ok(publish("v", 5), publish("v", 6, publishReadOnly), unpublish("v", 5), stage("v"))
		if took := time.Since(start); took != 0 {
			t.Errorf("the others waited %s", took)
		}
		h.ok(unpublish("v", 6), unpublish("v", 1))
		h.refuse(h.do(unpublish("v", 4)), state.Unavailable)
		h.k.mend()
		h.ok(unpublish("v", 2), unpublish("v", 3), unpublish("v", 4), unstage("v"))
		h.atRest("v")
	})
}

func TestOneVolumesHangBlocksNoOther(t *testing.T) {
	for _, o := range []op{opFind, opLook, opProbe, opAttach, opFormat, opMount} {
		bubble(t, func(h *harness) {
			h.volume("v")
			h.volume("w")
			hang := h.k.hang(o, "", true)
			first := h.begin(stage("v"))
			var others sync.WaitGroup
			for i := range 20 {
				id := fmt.Sprintf("w%d", i)
				h.volume(id)
				others.Go(func() {
					start := time.Now()
					for _, r := range []request{stage(id), publish(id, 1), unpublish(id, 1), unstage(id)} {
						if err := h.do(r); err != nil {
							t.Errorf("%s: %v", r, err)
						}
					}
					if took := time.Since(start); took != 0 {
						t.Errorf("volume %s waited %s", id, took)
					}
				})
			}
			others.Wait()
			report.Statuses(h.p.r.Reports())
			h.pending(first)
			hang.open()
			if err := h.got(first); err != nil {
				t.Error(err)
			}
			h.atRest("v")
		})
	}
}

func TestHungBindIsTold(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 2))
		hang := h.k.hang(opBind, targetPath("v", 1), true)
		h.refuse(h.do(publish("v", 1)), state.DeadlineExceeded, "step bind for target "+targetPath("v", 1))
		h.refuse(h.do(unpublish("v", 2)), state.DeadlineExceeded, "step bind for target "+targetPath("v", 1), targetPath("v", 2))
		hang.open()
		h.ok(publish("v", 1), unpublish("v", 2))
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

// The same of a growth that nobody asked for.
func TestUnaskedGrowthIsNotForgotten(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS))
		h.k.with(func() { v.capacity, v.size, v.device.size = 2*gib, 2*gib, 2*gib })
		h.k.fail(opGrow, "v", 2, errBoom)
		h.wake("v")
		h.wakeInBackOff("v")
		h.sleep(10 * time.Minute)
		if v.contents.Size != 2*gib {
			t.Error("the growth is forgotten")
		}
		h.atRest("v")
	})
}

// Copies of the stage in other mount namespaces hold the device until the
// staging directory is renewed.
func TestUnstageReleasesCopies(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		v.private = true
		h.ok(stage("v"), unstage("v"))
		h.atRest("v")
	})
}

// The renewal is made up for if it failed, or the process died before it.
func TestUnstageReleasesCopiesAfterAFailure(t *testing.T) {
	faults := map[string]*fault{
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
				h.k.fault(f)
				if err := h.do(unstage("v")); err == nil {
					t.Error("OK")
				}
				if h.dead() {
					<-h.p.done
					h.start()
				}
				h.sleep(5 * time.Minute)
				if err := h.do(unstage("v")); err != nil {
					t.Error(err)
				}
				h.atRest("v")
			})
		})
	}
}

func (h *harness) dead() (dead bool) {
	h.k.with(func() { dead = h.p.dead })
	return dead
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

// kubelet may remove the directory of a pod between a repair's look and its
// step: it stays removed.
func TestRepairMakesNoDirectory(t *testing.T) {
	for path, o := range map[string]op{stagePath("v"): opMount, targetPath("v", 1): opBind} {
		bubble(t, func(h *harness) {
			h.volume("v")
			h.ok(stage("v"), publish("v", 1))
			h.k.slow(o, path, 1, time.Second)
			h.k.with(func() {
				delete(h.k.mounts, path)
				h.k.drift("v")
			})
			h.wake("v")
			h.k.with(func() { h.k.rmdir(path) })
			h.sleep(time.Minute)
			h.k.with(func() {
				if h.k.files[path] != nil || len(h.k.mounts[path]) > 0 {
					t.Errorf("%s was made again", path)
				}
			})
			h.ok(publish("v", 1)) // which asks for both
			h.atRest("v")
		})
	}
}

// A device that is going away is reclaimed by a new stage.
func TestDetachingDeviceIsReclaimed(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"))
		h.k.with(func() { v.device.detaching = true })
		h.wake("v")
		h.atRest("v")
	})
}

func TestRestartAdoptsWithoutAStep(t *testing.T) {
	bubble(t, func(h *harness) {
		for i := range 10 {
			id := fmt.Sprintf("v%d", i)
			h.volume(id)
			h.ok(stage(id), publish(id, 1), publish(id, 2, publishReadOnly))
		}
		before := h.k.changes()
		h.kill()
		h.start()
		synctest.Wait()
		for i := range 10 {
			id := fmt.Sprintf("v%d", i)
			h.atRest(id)
			h.ok(stage(id), publish(id, 1))
		}
		if n := h.k.changes() - before; n != 0 {
			t.Errorf("%d steps after a restart", n)
		}
	})
}

func TestRestartHealsWhatWentMeanwhile(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), publish("v", 2))
		h.kill()
		h.k.with(func() { clear(h.k.mounts) })
		h.start()
		synctest.Wait()
		h.atRest("v")
	})
}

// No repair makes a directory that kubelet has removed; a new call does.
func TestRemovedTargetIsMadeAgainOnlyWhenAsked(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.with(func() {
			delete(h.k.mounts, targetPath("v", 1))
			delete(h.k.files, targetPath("v", 1))
		})
		h.restart()
		h.sleep(time.Hour)
		if h.k.files[targetPath("v", 1)] != nil {
			t.Fatal("a repair made the target")
		}
		h.ok(publish("v", 1))
		h.atRest("v")
	})
}

// More than a look reads is read once, in the step that sets the mark, and who
// waits is told how far that is.
func TestAProofIsMadeOnceAndTold(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.contents.Kind = state.ContentsUnproven })
		proof := h.k.hang(opProve, "v", false)
		answer := h.begin(stage("v"))
		h.pending(answer)
		h.sleep(time.Minute)
		if s := report.Statuses(h.p.r.Reports()); s[0].Step == nil || s[0].Step.Progress != "proving that it is blank: none read" {
			t.Errorf("the step that runs: %+v", s[0].Step)
		}
		story, err := h.p.r.Explain(context.Background(), "v")
		if told := strings.Join(story.Explanation().Next, " "); err != nil || !strings.Contains(told, "Begin-format for stage has been running for 1m0s: proving that it is blank: none read.") {
			t.Errorf("explained as %q (%v)", told, err)
		}
		h.sleep(time.Minute)
		h.refuse(h.got(answer), state.DeadlineExceeded, "step begin-format for stage has been running", "proving that it is blank: none read")
		proof.open()
		h.ok(stage("v"))
		if n := h.k.count(opProve, "v"); n != 1 {
			t.Errorf("proven %d times", n)
		}
		if n := h.k.count(opErase, "v"); n != 0 {
			t.Errorf("erased %d times what was proven blank", n)
		}
	})
	for _, end := range []mode{fails, crashes} {
		bubble(t, func(h *harness) { // after mkfs may have begun, nothing is proven any more
			v := h.volume("v")
			h.k.with(func() { v.contents.Kind = state.ContentsUnproven })
			h.k.fault(&fault{op: opFormat, key: "v", times: 1, mode: end, err: errors.New("boom")})
			_ = h.do(stage("v"))
			if end == crashes {
				h.start()
			}
			h.ok(stage("v"))
			if n := h.k.count(opErase, "v"); n != 1 {
				t.Errorf("erased %d times before the second format", n)
			}
		})
	}
}

// A proof that nobody wants any more is not finished, and leaves no mark.
func TestAProofEndsWithItsIntent(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.contents.Kind, h.k.endless = state.ContentsUnproven, true })
		answer := h.begin(stage("v"))
		h.sleep(time.Minute)
		if s := report.Statuses(h.p.r.Reports()); s[0].Step == nil || s[0].Step.Progress != "proving that it is blank: some read" {
			t.Errorf("the step that runs: %+v", s[0].Step)
		}
		began := time.Now()
		h.ok(unstage("v"))
		if took := time.Since(began); took > 2*time.Second {
			t.Errorf("the unstage took %s", took)
		}
		h.refuse(h.got(answer), state.Aborted, "superseded")
		if n := h.k.count(opBeginFormat, "v"); n != 0 {
			t.Errorf("marked %d times", n)
		}
		h.k.with(func() { h.k.endless = false })
		h.ok(stage("v"))
	})
}

// What was published raw for writing is not formatted, whatever it holds, also
// by a plugin that has lost its store.
func TestPublishedRawIsNotFormatted(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly), unpublish("v", 1), unstage("v"))
		h.ok(stage("v"), unstage("v")) // nobody could write
		h.k.with(func() {
			v.formatted, v.contents, v.data = "", state.Contents{Kind: state.ContentsBlank}, false
		})
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), unpublish("v", 1), unstage("v"))
		h.k.with(func() { v.contents, v.data = state.Contents{Kind: state.ContentsBlank}, false })
		h.refuse(h.do(stage("v")), state.FailedPrecondition, "published as a raw block device before", "clear-device v")
		if n := h.k.count(opBeginRaw, "v"); n != 1 {
			t.Errorf("noted %d times", n)
		}
	})
}

// Whatever dies or half finishes wherever, the work is finished after it.
func TestEveryStepMayFailHalfwayOrDie(t *testing.T) {
	lives := map[string][]request{
		"mount": {stage("v"), publish("v", 1), publish("v", 2, publishReadOnly), unpublish("v", 1), unpublish("v", 2), unstage("v")},
		"block": {stage("v", stageBlock), publish("v", 1, publishBlock), publish("v", 2, publishBlock, publishReadOnly), resize("v", 2*gib),
			unpublish("v", 1), unpublish("v", 2), unstage("v")},
		"xfs": {stage("v", stageXFS), publish("v", 1, publishXFS), resize("v", 2*gib), unpublish("v", 1), unstage("v")},
	}
	for life, requests := range lives {
		for _, o := range mutators() {
			for _, m := range []mode{fails, halfway, idles, crashes} {
				t.Run(fmt.Sprintf("%s/%s/%d", life, o, m), func(t *testing.T) {
					bubble(t, func(h *harness) {
						h.volume("v")
						h.k.fault(&fault{op: o, times: 1, mode: m, err: errBoom})
						h.k.fault(&fault{op: o, times: 1, mode: m, err: errBoom})
						for _, r := range requests {
							for try := 0; ; try++ {
								err := h.do(r)
								if err == nil {
									break
								}
								if state.ClassOf(err) != state.Unavailable || try == 5 {
									t.Fatalf("%s: %v", r, err)
								}
								if h.dead() {
									<-h.p.done
									h.start()
								}
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

// mkfs dies half-way and leaves what is neither blank nor a file system: only
// the durable mark lets the next process format it.
func TestInterruptedFormatIsMadeAgain(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.fault(&fault{op: opFormat, times: 1, mode: crashes})
		h.refuse(h.do(stage("v")), state.Unavailable)
		<-h.p.done
		if !v.formatting || v.contents.Kind != state.ContentsOther {
			t.Fatalf("mark %t, contents %s", v.formatting, v.contents.Kind)
		}
		h.start()
		synctest.Wait()
		h.atRest("v")
		if h.k.count(opErase, "v") != 1 || h.k.formats != 1 {
			t.Errorf("%d erasures, %d formats", h.k.count(opErase, "v"), h.k.formats)
		}
	})
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
				if err != nil {
					t.Error(err)
				}
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

func (c *countingMetrics) Orphans(int) {}

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

// Removals that fail for a while, one after the other, end all the same, and in
// the right order: pods, stage, device.
func TestTearDownEndsInOrder(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), publish("v", 2))
		for _, o := range []op{opUnmount, opRemove, opRenew, opDetach} {
			h.k.fail(o, "", 4, errBoom)
		}
		for _, r := range []request{unpublish("v", 1), unpublish("v", 2), unstage("v")} {
			if err := h.do(r); err != nil {
				h.refuse(err, state.Unavailable, "boom")
			}
		}
		h.sleep(10 * time.Minute)
		h.atRest("v")
		if !slices.Equal(h.store.List(), []*state.Volume(nil)) {
			t.Error("a record is left")
		}
	})
}
