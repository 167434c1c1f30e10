package reconciler

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

var errBoom = errors.New("boom")

func TestRepeatsJoin(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		for _, o := range mutators() {
			h.k.slow(o, "", -1, 3*time.Second)
		}
		for _, r := range []request{stage("v"), publish("v", 1), unpublish("v", 1), unstage("v")} {
			var callers sync.WaitGroup
			for range 20 {
				callers.Go(func() {
					if err := h.do(r); err != nil {
						t.Errorf("%s: %v", r, err)
					}
				})
			}
			callers.Wait()
			h.atRest("v")
		}
		for key, n := range h.k.calls {
			if !key.op.reads() && n != 1 {
				t.Errorf("%s of %s ran %d times", key.op, key.key, n)
			}
		}
	})
}

// A retry after DeadlineExceeded joins a running mkfs, which outlives its
// callers and runs once.
func TestRetryJoinsTheRunningStep(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.slow(opFormat, "v", -1, 5*time.Minute)
		h.refuse(h.do(stage("v")), state.DeadlineExceeded, "volume v", "stage", "step format for stage has been running for 1m58s", "ask again")
		h.refuse(h.do(stage("v")), state.DeadlineExceeded, "step format for stage has been running for 3m56s")
		h.ok(stage("v"))
		if n := h.k.count(opFormat, "v"); n != 1 {
			t.Errorf("mkfs ran %d times", n)
		}
	})
}

func TestAnswerComesBeforeTheDeadline(t *testing.T) {
	for given, want := range map[time.Duration]time.Duration{
		2 * time.Minute: 118 * time.Second, 20 * time.Second: 18 * time.Second, 10 * time.Second: 9 * time.Second, time.Second: 900 * time.Millisecond,
	} {
		bubble(t, func(h *harness) {
			h.volume("v")
			h.k.hang(opAttach, "v", true)
			start := time.Now()
			h.refuse(h.within(given, stage("v")), state.DeadlineExceeded, "step attach")
			if took := time.Since(start); took != want {
				t.Errorf("the answer to a call with %s came after %s, want %s", given, took, want)
			}
		})
	}
}

func TestCancelledCallLeavesTheIntent(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opAttach, "v", false)
		ctx, cancel := context.WithCancel(context.Background())
		answer := make(chan error, 1)
		r := stage("v")
		go func() { answer <- h.p.r.Ensure(ctx, r.id, r.part, r.edit) }()
		synctest.Wait()
		cancel()
		h.refuse(h.got(answer), state.Canceled, "step attach")
		hang.open()
		synctest.Wait()
		if !h.store.Get("v").Stage.Accepted {
			t.Error("the stage was not finished")
		}
		h.atRest("v")
	})
}

// A call whose time is up before it begins commits its intent all the same.
func TestExpiredCallLeavesTheIntent(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		err := h.within(-time.Second, stage("v"))
		if err != nil && state.ClassOf(err).Final() {
			t.Errorf("final: %v", err)
		}
		synctest.Wait()
		h.ok(stage("v"))
	})
}

func TestFailedAttemptIsAnsweredAtOnce(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, targetPath("v", 1), 3, errBoom)
		start := time.Now()
		err := h.do(publish("v", 1))
		h.refuse(err, state.Unavailable, "volume v", "bind", targetPath("v", 1), "boom")
		if !errors.Is(err, errBoom) {
			t.Error("the cause is not wrapped")
		}
		if took := time.Since(start); took != 0 {
			t.Errorf("the answer took %s", took)
		}
		h.sleep(time.Minute)
		h.atRest("v")
		h.ok(publish("v", 1))
	})
}

// A publish is told at once of a failure of the stage that it waits for.
func TestFailureOfWhatIsNeededIsAnsweredAtOnce(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
		h.k.fail(opMount, "", -1, errBoom)
		start := time.Now()
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "target "+targetPath("v", 1)+" waits for stage", "boom")
		if took := time.Since(start); took != 0 {
			t.Errorf("the answer took %s", took)
		}
		h.k.mend()
		h.ok(publish("v", 1))
		h.atRest("v")
	})
}

func TestRetryKicksOutOfBackOff(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		f := h.k.fail(opBind, "", -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.sleep(time.Hour)
		before := h.k.count(opBind, targetPath("v", 1))
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		if n := h.k.count(opBind, targetPath("v", 1)) - before; n != 1 {
			t.Errorf("a retry made %d attempts, want 1", n)
		}
		h.k.with(func() { f.times = 0 })
		start := time.Now()
		h.ok(publish("v", 1))
		if took := time.Since(start); took != 0 {
			t.Errorf("the retry waited %s", took)
		}
		h.atRest("v")
	})
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

func TestFinalFailureWithdrawsTheStage(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		v.contents = state.Contents{Kind: state.ContentsOther, Found: "LUKS header at byte 0"}
		h.k.slow(opDetach, "v", -1, 30*time.Second)
		start := time.Now()
		h.refuse(h.do(stage("v")), state.FailedPrecondition, "volume v", "LUKS header", "/pool/v", "clear-device v --i-understand-this-destroys-data")
		if took := time.Since(start); took != 30*time.Second {
			t.Errorf("the answer came after %s, and the undo took 30s", took)
		}
		if v.device != nil || h.store.Get("v") != nil {
			t.Errorf("device %v and record %v are left", v.device, h.store.Get("v"))
		}
		h.atRest("v")
	})
}

func TestMissingVolumeIsNotFound(t *testing.T) {
	bubble(t, func(h *harness) {
		h.refuse(h.do(stage("v")), state.NotFound, "volume v")
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
}

func TestFinalFailureWithdrawsOnlyItsTarget(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.with(func() { h.k.files[targetPath("v", 2)] = &fakeFile{kind: state.Directory, inUse: true} })
		h.refuse(h.do(publish("v", 2)), state.FailedPrecondition, targetPath("v", 2), "holds data")
		if h.store.Get("v").Targets[targetPath("v", 2)] != nil {
			t.Error("the refused target is still in the record")
		}
		if f := h.k.files[targetPath("v", 2)]; f == nil || !f.inUse {
			t.Error("the directory that was there is gone")
		}
		h.atRest("v")
		h.ok(stage("v"), publish("v", 1))
	})
}

// A step that fails with a final class withdraws as the planner's verdict does.
func TestFinalStepErrorWithdraws(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opMount, "", -1, state.Errorf(state.InvalidArgument, "bad option"))
		h.refuse(h.do(stage("v")), state.InvalidArgument, "bad option")
		h.atRest("v")
		h.k.mend()
		h.ok(stage("v"))
		h.k.fault(&fault{op: opBind, times: -1, mode: halfway, err: state.Errorf(state.FailedPrecondition, "no parent")})
		h.refuse(h.do(publish("v", 1)), state.FailedPrecondition, "no parent")
		if h.store.Get("v").Targets[targetPath("v", 1)] != nil {
			t.Error("the refused target is still in the record")
		}
	})
}

// All callers of a refused request are told, the joined ones too.
func TestFinalFailureIsToldToAllWhoJoined(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.slow(opAttach, "", -1, time.Second)
		h.k.fail(opMount, "", -1, state.Errorf(state.InvalidArgument, "bad option"))
		var callers sync.WaitGroup
		for range 20 {
			callers.Go(func() {
				if err := h.do(stage("v")); state.ClassOf(err) != state.InvalidArgument {
					t.Errorf("got %v", err)
				}
			})
		}
		callers.Wait()
		h.atRest("v")
	})
}

func TestUnavailableWhileTheUndoFails(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		v.contents = state.Contents{Kind: state.ContentsOther, Found: "LUKS header"}
		h.k.fail(opDetach, "v", 3, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable, "LUKS header", "taking back", "boom")
		if s := h.store.Get("v").Stage; !s.Gone || !s.Withdrawn {
			t.Errorf("the stage is not withdrawn: %+v", s)
		}
		h.sleep(time.Minute)
		h.atRest("v")
		if v.device != nil {
			t.Error("the device is left")
		}
	})
}

func TestNobodyIsToldAFinalCodeBeforeTheUndo(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		v.contents = state.Contents{Kind: state.ContentsOther, Found: "LUKS header"}
		hang := h.k.hang(opDetach, "v", true)
		answer := h.begin(stage("v"))
		h.pending(answer)
		h.sleep(2 * time.Minute)
		h.refuse(h.got(answer), state.DeadlineExceeded, "step detach")
		hang.open()
		synctest.Wait()
		h.atRest("v")
	})
}

func TestAcceptedIsNeverWithdrawn(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		foreign := fakeMount{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}
		h.k.with(func() {
			h.k.mounts[targetPath("v", 1)] = append([]fakeMount{foreign}, h.k.mounts[targetPath("v", 1)]...)
		})
		h.refuse(h.do(publish("v", 1)), state.FailedPrecondition, "tmpfs", targetPath("v", 1))
		h.k.with(func() {
			h.k.mounts[targetPath("v", 1)] = h.k.mounts[targetPath("v", 1)][1:]
			v.superRO = true
		})
		h.refuse(h.do(stage("v")), state.FailedPrecondition, "turned read-only")
		h.refuse(h.do(publish("v", 1)), state.FailedPrecondition, "turned read-only")
		if record := h.store.Get("v"); record.Stage.Gone || record.Targets[targetPath("v", 1)].Gone {
			t.Errorf("withdrawn: %+v", record)
		}
		h.k.with(func() { v.superRO = false })
		h.ok(stage("v"), publish("v", 1))
		h.atRest("v")
		if n := h.k.count(opUnmount, targetPath("v", 1)); n != 0 {
			t.Errorf("a running pod was unmounted %d times", n)
		}
	})
}

func TestUnpublishSupersedesPublish(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		hang := h.k.hang(opBind, "", true)
		first := h.begin(publish("v", 1))
		second := h.begin(unpublish("v", 1))
		hang.open()
		h.refuse(h.got(first), state.Aborted, "superseded")
		if err := h.got(second); err != nil {
			t.Error(err)
		}
		h.atRest("v")
	})
}

func TestPublishSupersedesUnpublish(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		hang := h.k.hang(opUnmount, "", true)
		first := h.begin(unpublish("v", 1))
		second := h.begin(publish("v", 1))
		hang.open()
		h.refuse(h.got(first), state.Aborted, "superseded")
		if err := h.got(second); err != nil {
			t.Error(err)
		}
		h.atRest("v")
		h.ok(publish("v", 1))
	})
}

func TestUnstageSupersedesStage(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFormat, "", true)
		first := h.begin(stage("v"))
		second := h.begin(unstage("v"))
		hang.open()
		h.refuse(h.got(first), state.Aborted, "superseded")
		if err := h.got(second); err != nil {
			t.Error(err)
		}
		if h.k.count(opMount, stagePath("v")) != 0 {
			t.Error("mounted for a stage that was superseded")
		}
		h.atRest("v")
	})
}

func TestStageSupersedesUnstage(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		hang := h.k.hang(opUnmount, "", true)
		first := h.begin(unstage("v"))
		h.refuse(h.do(publish("v", 1)), state.Aborted, "unstaged")
		second := h.begin(stage("v"))
		hang.open()
		h.refuse(h.got(first), state.Aborted, "superseded")
		if err := h.got(second); err != nil {
			t.Error(err)
		}
		h.atRest("v")
	})
}

// The edit of a final failure meets an intent that was superseded meanwhile:
// the caller is told that, and never a final code for what stands again.
func TestSupersededWhileBeingWithdrawn(t *testing.T) {
	for _, at := range []int{2, 3} { // the worker notes that it begins, and withdraws
		bubble(t, func(h *harness) {
			h.volume("v")
			h.ok(stage("v"))
			h.k.fail(opBind, "", 1, state.Errorf(state.FailedPrecondition, "no parent"))
			first := make(chan error, 1)
			edits := 0
			h.store.edits = func(string) {
				if edits++; edits == at {
					h.store.edits = nil
					if _, err := h.store.Edit("v", unpublish("v", 1).edit); err != nil {
						t.Error(err)
					}
					if _, err := h.store.Edit("v", publish("v", 1).edit); err != nil {
						t.Error(err)
					}
				}
			}
			go func() { first <- h.do(publish("v", 1)) }()
			synctest.Wait()
			h.refuse(h.got(first), state.Aborted)
			h.ok(publish("v", 1))
		})
	}
}

func TestUnstageIsRefusedWhilePublished(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), publish("v", 2))
		before := h.k.changes()
		h.refuse(h.do(unstage("v")), state.FailedPrecondition, targetPath("v", 1), targetPath("v", 2))
		h.ok(unpublish("v", 1))
		h.refuse(h.do(unstage("v")), state.FailedPrecondition, targetPath("v", 2))
		if n := h.k.changes() - before; n != 2 {
			t.Errorf("%d steps for a refused unstage and an unpublish of two", n)
		}
		h.atRest("v")
	})
}

// Unstage while an unpublish is under way waits for it.
func TestUnstageWaitsForUnpublish(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.fail(opUnmount, targetPath("v", 1), 3, errBoom)
		h.refuse(h.do(unpublish("v", 1)), state.Unavailable, "boom")
		h.refuse(h.do(unstage("v")), state.Unavailable, "stage waits for target", "boom")
		h.sleep(time.Minute)
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"))
	})
}

// CSI: nothing is staged at that path, so NodeUnstage is OK; it has nothing to
// do with the stage elsewhere.
func TestUnstageElsewhereIsOK(t *testing.T) {
	elsewhere := request{"v", state.StagePart(), func(v *state.Volume) error { return v.AskUnstage("/k/stage/other/v", time.Now()) }}
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"))
		if err := h.do(elsewhere); err != nil {
			t.Error(err)
		}
		h.k.with(func() { v.superRO = true })
		if err := h.do(elsewhere); err != nil {
			t.Error(err)
		}
	})
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opAttach, "v", true)
		staging := h.begin(stage("v"))
		if err := h.do(elsewhere); err != nil {
			t.Error(err)
		}
		hang.open()
		<-staging
	})
}

func TestRemovalIsNeverWithdrawn(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		refusal := state.Errorf(state.FailedPrecondition, "not now")
		h.k.fail(opUnmount, targetPath("v", 1), 5, refusal)
		h.refuse(h.do(unpublish("v", 1)), state.FailedPrecondition, "not now")
		if target := h.store.Get("v").Targets[targetPath("v", 1)]; target == nil || !target.Gone || target.Withdrawn {
			t.Errorf("the removal does not stand: %+v", target)
		}
		h.sleep(time.Minute)
		h.atRest("v")
		h.k.fail(opDetach, "v", 5, refusal)
		h.refuse(h.do(unstage("v")), state.FailedPrecondition, "not now")
		h.sleep(time.Minute)
		h.atRest("v")
		if len(h.store.List()) != 0 {
			t.Error("the record is left")
		}
	})
}

// A final failure of the look itself is a final answer only if what was asked
// is withdrawn, or a call for an id that no volume can have leaves a record
// that is looked at for ever.
func TestFinalFailureOfTheLookWithdraws(t *testing.T) {
	for _, class := range []state.Class{state.InvalidArgument, state.FailedPrecondition} {
		bubble(t, func(h *harness) {
			h.k.fail(opFind, "v", -1, state.Errorf(class, "no volume can have that id"))
			err := h.do(stage("v"))
			if err == nil {
				t.Fatal("OK")
			}
			if record := h.store.Get("v"); record != nil && state.ClassOf(err).Final() {
				t.Errorf("answered %s, and the stage stands: %+v", state.ClassOf(err), record.Stage)
			}
		})
	}
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opFind, "v", -1, state.Errorf(state.FailedPrecondition, "the pool is not there"))
		err := h.do(publish("v", 1))
		if target := h.store.Get("v").Targets[targetPath("v", 1)]; target != nil && state.ClassOf(err).Final() {
			t.Errorf("answered %s, and the target stands: %+v", state.ClassOf(err), target)
		}
		if err := h.do(unpublish("v", 1)); err == nil {
			t.Error("an end that cannot be seen was answered OK")
		}
		if err := h.do(unstage("v")); err == nil {
			t.Error("an end that cannot be seen was answered OK")
		}
		h.k.mend()
		h.ok(unpublish("v", 1), unstage("v"))
	})
}

// Facts of the backend that cannot be read stop set-up and no teardown.
func TestUnreadFactsStopNoTeardown(t *testing.T) {
	for _, class := range []state.Class{state.Unavailable, state.Internal} {
		bubble(t, func(h *harness) {
			h.volume("v")
			h.ok(stage("v"), publish("v", 1), publish("v", 2))
			h.k.unread = state.Errorf(class, "the pool cannot be read")
			h.ok(unpublish("v", 1))
			h.refuse(h.do(publish("v", 3)), state.Unavailable, "volume v", "observe", "the pool cannot be read")
			if _, err := h.p.r.Observe(context.Background(), &state.Volume{ID: "v"}); err == nil {
				t.Error("facts that were not read are told")
			}
			h.ok(unpublish("v", 2), unpublish("v", 3), unstage("v"))
			h.refuse(h.do(stage("v")), state.Unavailable, "the pool cannot be read")
			h.k.unread = nil
			h.ok(stage("v"), publish("v", 1))
		})
	}
}

func TestFailedLookIsAnsweredAtOnceAndKeepsTheIntent(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opFind, "v", 4, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable, "volume v", "observe", "boom")
		h.sleep(time.Minute)
		h.atRest("v")
		h.ok(stage("v"))
	})
}

func TestStopAnswersUnavailable(t *testing.T) {
	for _, o := range []op{opFind, opAttach, opLook, opProbe, opFormat} {
		for range 20 { // the answer must not depend on who is faster
			bubble(t, func(h *harness) {
				h.volume("v")
				h.k.hang(o, "", false)
				answer := h.begin(stage("v"))
				h.stop()
				h.refuse(h.got(answer), state.Unavailable)
				if h.store.Get("v").Stage.Gone {
					t.Error("the intent does not stand")
				}
			})
		}
	}
}

func TestRunWaitsForAHungStep(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opAttach, "", true)
		answer := h.begin(stage("v"))
		h.p.end()
		h.refuse(h.got(answer), state.Unavailable, "stopping")
		select {
		case <-h.p.done:
			t.Error("Run returned over a hung step")
		default:
		}
		hang.open()
		<-h.p.done
		if n := h.k.count(opFormat, "v"); n != 0 {
			t.Error("another step was begun while stopping")
		}
		h.refuse(h.do(stage("v")), state.Unavailable, "stopping")
	})
}

func TestUnobservedIsUnavailable(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.stop()
		hang := h.k.hang(opFind, "v", true)
		h.start()
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "not been observed yet")
		hang.open()
		h.ok(publish("v", 1))
	})
}

func TestRefusedEditChangesNothing(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.refuse(h.do(publish("v", 1)), state.FailedPrecondition, "volume v", "not staged")
		h.refuse(h.do(resize("v", gib)), state.FailedPrecondition, "not staged")
		h.atRest("v")
		if len(h.store.List()) != 0 || len(h.p.r.volumes) != 0 || h.k.changes() != 0 {
			t.Error("a refused edit left something")
		}
		h.ok(stage("v"), publish("v", 1))
		before := h.k.changes()
		h.refuse(h.do(stage("v", stageXFS)), state.AlreadyExists)
		h.refuse(h.do(publish("v", 1, publishReadOnly)), state.AlreadyExists)
		h.refuse(h.do(publish("v", 2, publishXFS)), state.FailedPrecondition)
		if h.k.changes() != before {
			t.Error("a refused edit had steps")
		}
		h.atRest("v")
	})
}

func TestStoreThatFails(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.store.fail = func(string) error { return errBoom }
		h.refuse(h.do(stage("v")), state.Unavailable, "volume v", "boom")
		if h.k.changes() != 0 {
			t.Error("acted on an intent that was not committed")
		}
		commits := 0
		h.store.fail = func(string) error {
			if commits++; commits > 1 && commits < 6 { // the intent is, what was seen is not
				return errBoom
			}
			return nil
		}
		h.refuse(h.do(stage("v")), state.Unavailable, "volume v", "boom")
		h.sleep(time.Minute)
		h.atRest("v")
		h.ok(stage("v"))
	})
}

func TestGrowth(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS), publish("v", 1, publishXFS), resize("v", 2*gib))
		if v.contents.Size != 2*gib || v.size != 2*gib {
			t.Errorf("file system %d, backing %d bytes", v.contents.Size, v.size)
		}
		before := h.k.changes()
		h.ok(resize("v", 2*gib), resize("v", gib))
		if h.k.changes() != before {
			t.Error("a size that is had already took steps")
		}
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"), stage("v", stageXFS))
		h.atRest("v")
	})
}

func TestGrowthOfABlockVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), resize("v", 3*gib))
		if v.device.size != 3*gib || h.k.count(opGrow, "v") != 0 {
			t.Errorf("device %d bytes, %d growths of a file system", v.device.size, h.k.count(opGrow, "v"))
		}
		h.atRest("v")
	})
}

// A mounted ext4 that cannot grow on this node refuses the growth for good, and
// the last accepted size is wanted again.
func TestRefusedGrowthIsWithdrawn(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"), publish("v", 1), resize("v", gib))
		h.refuse(h.do(resize("v", 2*gib)), state.FailedPrecondition, "volume v", "size", "CAP_SYS_RESOURCE", "next staged")
		record := h.store.Get("v")
		if record.Size == nil || record.Size.Bytes != gib || !record.Size.Accepted {
			t.Errorf("the size is not restored: %+v", record.Size)
		}
		if record.Stage.Gone || record.Targets[targetPath("v", 1)].Gone || h.k.count(opUnmount, stagePath("v")) != 0 {
			t.Error("the stage was touched")
		}
		h.atRest("v")
		h.refuse(h.do(resize("v", 2*gib)), state.FailedPrecondition, "next staged")
		h.ok(unpublish("v", 1), unstage("v"), stage("v"))
		if v.contents.Size != 2*gib {
			t.Errorf("the file system did not grow with the next stage: %d bytes", v.contents.Size)
		}
		h.ok(resize("v", 2*gib))
		h.atRest("v")
	})
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.refuse(h.do(resize("v", 2*gib)), state.FailedPrecondition)
		if size := h.store.Get("v").Size; size != nil {
			t.Errorf("a size is wanted that was never accepted: %+v", size)
		}
		h.atRest("v")
	})
}

// A pool that is full now is not final: the growth goes on once there is room.
func TestGrowthWithoutRoomGoesOn(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS))
		h.k.fail(opGrowDevice, "v", 5, state.Errorf(state.ResourceExhausted, "the pool is full"))
		h.refuse(h.do(resize("v", 2*gib)), state.ResourceExhausted, "the pool is full")
		h.ok(publish("v", 1, publishXFS))
		h.sleep(time.Minute)
		h.atRest("v")
		h.ok(resize("v", 2*gib))
	})
}

// lose takes the store away, as a reader of the node would meet it.
func (h *harness) lose() {
	h.stop()
	h.store = newFakeStore()
	h.start()
}

func TestAdopt(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		refuse := func(class state.Class, words string, edit func(*state.Volume) error) {
			t.Helper()
			before := h.k.changes()
			h.refuse(h.do(request{"v", state.TargetPart(targetPath("v", 1)), edit}), class, words)
			if v := h.store.Get("v"); v != nil || h.k.changes() != before {
				t.Errorf("a refusal leaves %s after %d changes", marshal(v), h.k.changes()-before)
			}
		}
		refuse(state.FailedPrecondition, "not staged", publish("v", 1).edit)
		h.refuse(h.do(publish("x", 1)), state.NotFound, "no such volume")
		h.refuse(h.do(growth("x", "", state.Capability{})), state.NotFound, "no such volume")
		h.ok(stage("v"))
		h.lose()
		refuse(state.FailedPrecondition, "not staged", publish("v", 1, publishXFS).edit)
		refuse(state.FailedPrecondition, "not staged", func(v *state.Volume) error {
			return v.AskPublish(&state.Target{Path: targetPath("v", 1), Capability: mountCapability()}, "/k/stage/other/v", time.Now())
		})
		h.refuse(h.do(growth("v", "", state.Capability{})), state.FailedPrecondition, "not staged")
		if v := h.store.Get("v"); v != nil {
			t.Errorf("a refused growth leaves %s", marshal(v))
		}
		before := h.k.changes()
		h.ok(publish("v", 1))
		if n := h.k.changes() - before; n != 1 {
			t.Errorf("%d steps, want a bind", n)
		}
		if s := h.store.Get("v").Stage; !s.Adopted || s.Provisional || s.Begun {
			t.Errorf("the stage is %+v", s)
		}
		h.ok(stage("v", func(s *state.Stage) { s.Context = map[string]string{"a": "b"} }))
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
}

// growth asks for a GiB, as NodeExpandVolume does.
func growth(id, path string, c state.Capability) request {
	return request{id, state.SizePart(), func(v *state.Volume) error {
		if err := v.Presume(path, c, nil, time.Now()); err != nil {
			return err
		}
		return v.AskSize(gib, 0, time.Now())
	}}
}

// What a growth is answered with does not depend on what comes after it.
func TestGrowthTellsTheSizeOfItsAnswer(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		w := h.p.r.register("v", state.SizePart())
		if err := h.p.r.ensure(context.Background(), "v", w, growth("v", stagePath("v"), mountCapability()).edit); err != nil {
			t.Fatal(err)
		}
		h.ok(unstage("v"))
		if h.p.r.unregister("v", w); w.bytes != gib {
			t.Errorf("%d bytes are told", w.bytes)
		}
		h.ok(stage("v"))
		if bytes, err := h.p.r.EnsureSize(context.Background(), "v", growth("v", stagePath("v"), mountCapability()).edit); err != nil || bytes != gib {
			t.Errorf("%d bytes are told, and %v", bytes, err)
		}
	})
}

func TestGrowthAdopts(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.lose()
		h.refuse(h.do(growth("v", stagePath("v"), blockCapability())), state.FailedPrecondition, "not staged")
		h.ok(growth("v", stagePath("v"), mountCapability()))
		h.atRest("v")
	})
}

// What stands read-only is adopted so, and shown for writing to nobody.
func TestAdoptReadOnly(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "ext4")
		h.ok(stage("v", stageReadOnly))
		h.lose()
		h.ok(publish("v", 1, publishReadOnly))
		if s := h.store.Get("v").Stage; !s.Adopted || !s.ReadOnly {
			t.Errorf("the stage is %+v", s)
		}
		h.lose()
		h.refuse(h.do(publish("v", 2)), state.FailedPrecondition, "staged read-only")
		v := h.store.Get("v")
		if v == nil || !v.Stage.ReadOnly || len(v.Targets) > 0 {
			t.Errorf("the record is %s", marshal(v))
		}
		h.refuse(h.do(publish("v", 2)), state.FailedPrecondition, "staged read-only")
		h.ok(publish("v", 1, publishReadOnly))
		h.atRest("v")
	})
}

// Of two that meet no record, each has its own answer.
func TestTwoPublishesOfALostStage(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFind, "v", false)
		one, two := h.begin(publish("v", 1)), h.begin(publish("v", 2))
		h.pending(one)
		h.pending(two)
		h.refuse(h.do(publish("v", 3, publishXFS)), state.Aborted, "a caller waits")
		h.refuse(h.do(stage("v")), state.Aborted, "a caller waits")
		hang.open()
		h.refuse(<-one, state.FailedPrecondition, "not staged")
		h.refuse(<-two, state.FailedPrecondition, "not staged")
		if v := h.store.Get("v"); v != nil {
			t.Errorf("left is %s", marshal(v))
		}
	})
	bubble(t, func(h *harness) { // nobody waits any more: what is asked for in earnest supersedes
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		h.refuse(h.within(20*time.Second, publish("v", 1)), state.DeadlineExceeded)
		answer := h.begin(stage("v"))
		hang.open()
		if err := <-answer; err != nil {
			t.Error(err)
		}
		h.ok(publish("v", 1))
		h.atRest("v")
	})
	bubble(t, func(h *harness) { // and an unpublish ends it
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		h.refuse(h.within(20*time.Second, publish("v", 1)), state.DeadlineExceeded)
		answer := h.begin(unpublish("v", 1))
		hang.open()
		if err := <-answer; err != nil {
			t.Error(err)
		}
		h.sleep(time.Second)
		if v := h.store.Get("v"); v != nil {
			t.Errorf("left is %s", marshal(v))
		}
	})
}

// What stands without a record is a success only for whoever asks for the
// options that it is seen to have, and is left as it is.
func TestFoundStage(t *testing.T) {
	flags := func(words ...string) func(*state.Stage) {
		return func(s *state.Stage) { s.Capability.Flags = words }
	}
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", flags("journal_ioprio=2", "sync")), publish("v", 1))
		h.restart() // with the store kept nothing is in question
		h.ok(stage("v", flags("journal_ioprio=2", "sync")))
		adopt := func(words ...string) error {
			return h.do(publish("v", 1, func(t *state.Target) { t.Capability.Flags = words }))
		}
		h.lose()
		h.k.with(func() {
			h.k.mounts[stagePath("v")][0].Options = "rw,sync" // what the kernel shows
			v.capacity *= 2                                   // a growth was interrupted: the first step is not the mount's
			v.size = v.capacity
		})
		before := h.k.changes()
		for _, words := range [][]string{nil, {"journal_ioprio=2", "sync"}, {"sync", "commit=17"}} {
			h.refuse(h.do(stage("v", flags(words...))), state.FailedPrecondition, "makes the difference", "stage it anew")
			h.refuse(adopt(words...), state.FailedPrecondition, "makes the difference")
		}
		if h.store.Get("v") != nil || h.k.changes() != before {
			t.Errorf("a refusal leaves %+v, %d changes", h.store.Get("v"), h.k.changes()-before)
		}
		h.ok(stage("v", flags("sync")))
		h.ok(stage("v", flags("sync")), publish("v", 1))
		h.lose()
		if err := adopt("sync"); err != nil {
			t.Error(err)
		}
		h.ok(unpublish("v", 1))
		h.refuse(h.do(stage("v", flags("sync", "commit=17"))), state.AlreadyExists, `"commit" makes the difference`)
		h.refuse(h.do(stage("v")), state.AlreadyExists, `"sync" makes the difference`)
		h.ok(stage("v", flags("sync,noexec")), publish("v", 1))
	})
}

// The store is lost after a crash amid a growth, when the device is behind its
// backing: the stage is adopted, and the device follows; what does not stand is not.
func TestAdoptWhatIsGrowing(t *testing.T) {
	for name, row := range map[string]struct {
		stage   request
		never   request // of another one, which does not stand
		publish request
	}{
		"mounted": {stage("v"), publish("v", 1, publishXFS), publish("v", 1)},
		"not raw": {stage("v"), publish("v", 1, publishBlock), publish("v", 1)},
		"raw":     {stage("v", stageBlock), publish("v", 1), publish("v", 1, publishBlock)},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				volume := h.volume("v")
				h.ok(row.stage)
				h.stop()
				h.store = newFakeStore() // lost
				h.k.with(func() { volume.capacity, volume.size = 2*gib, 2*gib })
				h.start()
				h.refuse(h.do(row.never), state.FailedPrecondition, "not staged")
				h.ok(row.publish)
				h.atRest("v")
				if volume.device.size != 2*gib {
					t.Errorf("the device has %d bytes", volume.device.size)
				}
				h.ok(unpublish("v", 1), unstage("v"))
				h.atRest("v")
			})
		})
	}
}

// A stage on its way out is a removal, and a publish is no request to stage.
func TestAdoptNeverSupersedesAnUnstage(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opUnmount, "", 3, errBoom)
		h.refuse(h.do(unstage("v")), state.Unavailable)
		h.refuse(h.do(publish("v", 1)), state.Aborted, "being unstaged")
		h.sleep(time.Minute)
		if h.store.Get("v") != nil {
			t.Error("the unstage was forgotten")
		}
	})
}

func TestObserveIsBounded(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.hang(opFind, "v", true)
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := h.p.r.Observe(ctx, &state.Volume{ID: "v"})
		h.refuse(err, state.DeadlineExceeded, "volume v")
	})
}

func TestAccessModeAllowsOneTarget(t *testing.T) {
	single := func(t *state.Target) { t.Capability.Mode = "SINGLE_NODE_SINGLE_WRITER" }
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v", func(s *state.Stage) { s.Capability.Mode = "SINGLE_NODE_SINGLE_WRITER" }), publish("v", 1, single))
		h.refuse(h.do(publish("v", 2, single)), state.FailedPrecondition, targetPath("v", 1))
		h.k.fail(opUnmount, targetPath("v", 1), 1, errBoom)
		h.refuse(h.do(unpublish("v", 1)), state.Unavailable)
		h.refuse(h.do(publish("v", 2, single)), state.Aborted, targetPath("v", 1))
		h.ok(unpublish("v", 1), publish("v", 2, single))
		h.atRest("v")
	})
}

// A caller is not lost when a worker finishes with the volume between its
// registration and its edit.
func TestCallerIsNotForgotten(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.store.edits = func(string) {
			h.store.edits = nil
			h.wake("v")
		}
		start := time.Now()
		h.ok(stage("v"))
		if took := time.Since(start); took != 0 {
			t.Errorf("the answer took %s", took)
		}
		h.atRest("v")
	})
}

// Waiters must not be kept, nor volumes that are only asked about.
func TestNothingIsKeptOfManyCalls(t *testing.T) {
	bubble(t, func(h *harness) {
		for i := range 100 {
			id := fmt.Sprintf("v%d", i)
			h.volume(id)
			h.ok(stage(id), publish(id, 1), unpublish(id, 1), unstage(id))
			h.refuse(h.do(publish(id, 1)), state.FailedPrecondition)
			h.wake(id)
		}
		synctest.Wait()
		if n := len(h.p.r.volumes); n != 0 {
			t.Errorf("%d volumes are kept in memory", n)
		}
	})
}
