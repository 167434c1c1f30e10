package reconciler

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
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
func TestHungLooksAreMadeOnce(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		defer hang.open()
		before := h.k.count(opFind, "v")
		for range 50 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			if _, err := h.p.r.Observe(ctx, &state.Volume{ID: "v"}); state.ClassOf(err) != state.DeadlineExceeded {
				t.Errorf("a look that hangs ends with %v", err)
			}
			cancel()
		}
		if made := h.k.count(opFind, "v") - before; made != 1 {
			t.Errorf("%d looks hang", made)
		}
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
		h.atOnce(func() { h.ok(publish("v", 5), publish("v", 6, publishReadOnly), unpublish("v", 5), stage("v")) })
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
			require.NoError(h.t, h.got(first))
			h.atRest("v")
		})
	}
}

// A look that hangs keeps nobody beyond the time for an answer, and no intent
// from being written; the work is done when it ends, though nobody asks again.
func TestHungLook(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		inTime := func(r request) {
			t.Helper()
			start := time.Now()
			h.refuse(h.within(20*time.Second, r), state.DeadlineExceeded, "volume v", "step look has been running since ")
			if took := time.Since(start); took != 18*time.Second {
				t.Errorf("the answer came after %s", took)
			}
		}
		inTime(stage("v", stageOpen))
		if s := h.store.Get("v").Stage; s == nil || s.Capability.FSType != "" {
			t.Errorf("the record asks for %+v", s)
		}
		if s := report.Statuses(h.p.r.Reports()); len(s) != 1 || s[0].Step == nil || s[0].Step.Step != "look" {
			t.Errorf("the status is %+v", s)
		}
		inTime(publish("v", 1, func(t *state.Target) { t.Capability.FSType = "" }))
		inTime(resize("v", 2*gib))
		hang.open()
		synctest.Wait()
		h.atRest("v")
		record := h.store.Get("v")
		if record.Stage.Capability.FSType != "xfs" || record.Targets[targetPath("v", 1)].Capability.FSType != "xfs" || record.Size.Bytes != 2*gib {
			t.Errorf("the record is %s", marshal(record))
		}
		h.ok(stage("v", stageXFS), stage("v", stageOpen), publish("v", 1, publishXFS))
		h.refuse(h.do(stage("v")), state.AlreadyExists)
	})
}

// What stands without a record is looked at in the time for an answer, too, and
// the retry joins that look.
func TestHungLookBeforeAdoption(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.lose()
		hang := h.k.hang(opFind, "v", true)
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		ctx = deadline.WithAnswerTime(ctx)
		start := time.Now()
		r := publish("v", 1)
		h.refuse(h.p.r.Ensure(ctx, r.id, r.part, r.edit), state.DeadlineExceeded, "step look has been running since ")
		another := h.k.hang(opFind, "v", true) // not that of the worker
		_, err := h.p.r.Observe(ctx, &state.Volume{ID: "v"})
		h.refuse(err, state.DeadlineExceeded, "volume v", "look")
		another.open()
		if took := time.Since(start); took != 18*time.Second {
			t.Errorf("the last answer came after %s", took)
		}
		if v := h.store.Get("v"); v == nil || !v.Stage.Provisional || v.Targets[targetPath("v", 1)] == nil {
			t.Errorf("the record is %s", marshal(v))
		}
		h.refuse(h.within(20*time.Second, r), state.DeadlineExceeded, "step look has been running since ")
		answer := h.begin(r)
		h.pending(answer)
		hang.open()
		require.NoError(h.t, <-answer)
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"))
	})
}
