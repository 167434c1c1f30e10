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
	"github.com/csi-node/csi-node/test/require"
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
		h.refuse(h.do(stage("v")), state.DeadlineExceeded, "volume v", "stage", "step format for stage has been running since 2000-01-01T00:00:00Z", "ask again")
		h.refuse(h.do(stage("v")), state.DeadlineExceeded, "step format for stage has been running since 2000-01-01T00:00:00Z") // the same words
		h.ok(stage("v"))
		h.wantCalls(1, opFormat, "v")
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

// CSI: nothing is staged at that path, so NodeUnstage is OK once that was seen; it has
// nothing to do with the stage elsewhere.
func TestUnstageElsewhereIsOK(t *testing.T) {
	elsewhere := unmount("v", otherStagePath)
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"))
		require.NoError(h.t, h.do(elsewhere))
		h.k.with(func() { v.superRO = true })
		require.NoError(h.t, h.do(elsewhere))
	})
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opAttach, "v", true)
		staging := h.begin(stage("v"))
		h.pending(staging)
		ended := h.begin(elsewhere)
		h.pending(ended)
		hang.open()
		require.NoError(t, errors.Join(<-staging, <-ended))
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
		h.wantCalls(0, opFormat, "v")
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

// A caller is not lost when a worker finishes with the volume between its
// registration and its edit.
func TestCallerIsNotForgotten(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.store.edits = func(string) {
			h.store.edits = nil
			h.wake("v")
		}
		h.atOnce(func() { h.ok(stage("v")) })
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

// A commit of the store that fails is told. Nothing is done for an intent that is not
// written, and nobody is told that something holds before that is written.
func TestNobodyIsToldWhatIsNotWritten(t *testing.T) {
	for name, fails := range map[string][2]int{ // the first and the last commit
		"the intent": {1, 1}, "that it holds": {2, 2}, "all but the intent": {2, 5},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.formatted("v", "ext4")
				commits := 0
				h.store.fail = func(string) error {
					if commits++; commits >= fails[0] && commits <= fails[1] {
						return errBoom
					}
					return nil
				}
				h.refuse(h.do(stage("v")), state.Unavailable, "volume v", "boom")
				if name == "the intent" {
					h.noStepSince(0)
				}
				h.sleep(time.Minute)
				h.ok(stage("v"))
				h.atRest("v")
			})
		})
	}
}

// A call is forgotten by a crash only if nobody was told of it and nothing was done for it.
func TestWhatSomebodyWasToldOutlivesACrash(t *testing.T) {
	for name, told := range map[string]bool{"told that its time is up": true, "not told": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.formatted("v", "ext4")
				h.k.hang(opFind, "v", false)
				answer := h.begin(stage("v"))
				if told {
					h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded, "step look")
				}
				h.noStepSince(0)
				h.kill()
				<-answer
				h.k.mend()
				h.start()
				h.sleep(time.Minute)
				var staged bool
				h.k.with(func() { staged = len(h.k.mounts[stagePath("v")]) > 0 })
				if staged != told {
					t.Errorf("after the crash it is staged: %t", staged)
				}
				h.ok(stage("v"), publish("v", 1))
				h.atRest("v")
			})
		})
	}
}

// What a step was made for outlives a crash, also if nobody was told.
func TestWhatIsBegunOutlivesACrash(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "ext4")
		h.ok(stage("v"), publish("v", 1))
		h.k.hang(opRemove, targetPath("v", 1), false)
		answer := h.begin(unpublish("v", 1))
		h.kill()
		<-answer
		h.k.mend()
		h.start()
		h.sleep(time.Minute)
		if v := h.store.Get("v"); v == nil || len(v.Targets) > 0 {
			t.Errorf("after the crash the record is %+v", v)
		}
		h.k.with(func() {
			if m := h.k.mounts[targetPath("v", 1)]; len(m) > 0 {
				t.Errorf("after the crash the target is bound: %+v", m)
			}
		})
	})
}

// A publish that cannot be, whose caller a crash has cut off, and after which the CO asks
// for another that cannot be either: it is told so for good, once the first is taken back.
func TestRefusedPublishEndsThePendingOne(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v", stageBlock))
		h.k.hang(opBindDevice, targetPath("v", 1), false)
		answer := h.begin(publish("v", 1, publishBlock))
		h.refuse(h.do(publish("v", 1)), state.Aborted, "a caller waits")
		h.kill()
		<-answer
		h.k.mend()
		h.k.fail(opBindDevice, targetPath("v", 1), 1000, state.Errorf(state.FailedPrecondition, "a directory"))
		h.start()
		h.refuse(h.do(publish("v", 1)), state.Aborted, "staged as block", "still pending")
		h.sleep(time.Second)
		h.refuse(h.do(publish("v", 1)), state.FailedPrecondition, "staged as block")
		h.ok(unpublish("v", 1), unstage("v"))
		h.noRecord("v")
	})
}

// A publish that gives way to a refused one does not come back with the next process: the CO
// was told that nothing is there.
func TestGivenUpPublishStaysSo(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock))
		h.k.with(func() {
			v.device = nil
			h.k.drift("v")
		})
		h.k.fail(opAttach, "v", 1000, errBoom)
		h.refuse(h.do(publish("v", 1, publishBlock)), state.Unavailable)
		h.refuse(h.do(publish("v", 1)), state.Aborted, "still pending")
		h.refuse(h.do(publish("v", 1)), state.FailedPrecondition, "staged as block")
		h.kill()
		h.k.mend()
		h.start()
		h.sleep(time.Hour)
		if v := h.store.Get("v"); len(v.Targets) > 0 {
			t.Errorf("it came back: %s", marshal(v))
		}
		h.ok(unstage("v"))
	})
}

// The edit of a call that has ended would land after that of a later one.
func TestEndedCallAsksNothing(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r := stage("v")
		h.refuse(h.p.r.Ensure(ctx, r.id, r.part, r.edit), state.Canceled, "nothing was asked")
		h.noRecord("v")
	})
}

// A retry has an attempt of its own: what failed before it came is no answer.
func TestRetryIsNotToldOfAnEarlierAttempt(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opMount, stagePath("v"), false)
		staging := h.begin(stage("v"))
		h.k.fail(opBind, targetPath("v", 1), 1, errBoom)
		h.k.slow(opBind, targetPath("v", 2), 1, 10*time.Second)
		first, other := h.begin(publish("v", 1)), h.begin(publish("v", 2))
		hang.open()
		h.sleep(time.Second)
		h.refuse(<-first, state.Unavailable)
		if err := <-h.begin(publish("v", 1)); err != nil { // while the other's bind runs
			t.Errorf("told of an attempt before it: %v", err)
		}
		require.NoError(h.t, errors.Join(<-staging, <-other))
	})
}
