package reconciler

import (
	"context"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// What hangs at one target holds up no other.
func TestHungLookAtATargetLeavesOthersAlone(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		hang := h.k.hang(opLook, targetPath("v", 1), false)
		defer hang.open()
		h.ok(publish("v", 2))
	})
}

// Looks that never come back do not pile up.
func TestHungLooksLoseOneGoroutine(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		defer hang.open()
		synctest.Wait()
		before := runtime.NumGoroutine()
		for range 50 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			if _, err := h.p.r.Observe(ctx, &state.Volume{ID: "v"}); state.ClassOf(err) != state.DeadlineExceeded {
				t.Errorf("a look that hangs ends with %v", err)
			}
			cancel()
		}
		if lost := runtime.NumGoroutine() - before; lost > 2 {
			t.Errorf("%d goroutines are lost", lost)
		}
	})
}

// A refused request takes down nothing that it did not begin.
func TestRefusedStageAfterALostStoreLeavesTheStage(t *testing.T) {
	for name, ask := range map[string]func(*state.Stage){"other type": stageXFS, "turned read-only": func(*state.Stage) {}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				h.ok(stage("v"), publish("v", 1))
				h.stop()
				h.store = newFakeStore()
				h.k.with(func() { v.superRO = name == "turned read-only" })
				h.start()
				h.refuse(h.do(stage("v", ask)), state.FailedPrecondition)
				if h.k.count(opUnmount, stagePath("v")) > 0 {
					t.Error("the stage of a running pod was unmounted")
				}
			})
		})
	}
}

// A device whose file system is mounted is not shown raw.
func TestRawAccessIsRefusedOverAMountedFilesystem(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.stop()
		h.store = newFakeStore()
		h.start()
		h.refuse(h.do(publish("v", 2, publishBlock)), state.FailedPrecondition, "not staged")
		h.refuse(h.do(stage("v", stageBlock)), state.FailedPrecondition)
	})
}

// What a pod wrote to a raw device is never taken for the rest of a broken format.
func TestRawAccessIsRefusedOverAFormattingMark(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opFormat, "v", 1, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable)
		h.ok(unstage("v"))
		h.refuse(h.do(stage("v", stageBlock)), state.FailedPrecondition)
		h.ok(stage("v"))
	})
}

// No repair makes a directory that kubelet has removed; a publish does.
func TestRemovedStagingDirectory(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.with(func() {
			delete(h.k.mounts, stagePath("v"))
			delete(h.k.files, stagePath("v"))
		})
		mounts := h.k.count(opMount, stagePath("v"))
		h.restart()
		h.sleep(time.Second)
		if h.k.count(opMount, stagePath("v")) != mounts {
			t.Error("a repair made it again")
		}
		h.ok(publish("v", 1))
	})
}

// The same refused growth gets the same answer each time.
func TestGrowthOfAReadOnlyStage(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS, stageReadOnly), resize("v", gib))
		for range 3 {
			h.refuse(h.do(resize("v", 2*gib)), state.FailedPrecondition)
		}
	})
}

// A growth for which there is no room does not stand in the way of a smaller one.
func TestSmallerGrowthReplacesOneWithoutRoom(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS))
		h.k.fail(opGrowDevice, "v", 1, state.Errorf(state.ResourceExhausted, "full"))
		h.refuse(h.do(resize("v", 100*gib)), state.ResourceExhausted)
		h.ok(resize("v", 2*gib))
		if got := h.store.Get("v").Size.Bytes; got != 2*gib {
			t.Errorf("%d bytes are asked", got)
		}
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
		for _, done := range []<-chan error{staging, other} {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}
