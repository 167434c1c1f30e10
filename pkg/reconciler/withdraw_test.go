package reconciler

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

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

// What was accepted is never withdrawn, and so never refused with a final code: kubelet,
// which may not have heard that it was accepted, would forget what stands. Of a size nothing
// stands, and a final code ends kubelet's tries.
func TestAcceptedIsNeverWithdrawn(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"), publish("v", 1), resize("v", gib))
		foreign := fakeMount{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}
		h.k.with(func() {
			h.k.mounts[targetPath("v", 1)] = append([]fakeMount{foreign}, h.k.mounts[targetPath("v", 1)]...)
		})
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "tmpfs", targetPath("v", 1))
		h.k.with(func() {
			h.k.mounts[targetPath("v", 1)] = h.k.mounts[targetPath("v", 1)][1:]
			v.superRO = true
		})
		h.refuse(h.do(stage("v")), state.Unavailable, "turned read-only")
		h.refuse(h.do(publish("v", 1)), state.Unavailable, "turned read-only")
		h.refuse(h.do(resize("v", gib)), state.FailedPrecondition, "turned read-only")
		if record := h.store.Get("v"); record.Stage.Gone || record.Targets[targetPath("v", 1)].Gone {
			t.Errorf("withdrawn: %+v", record)
		}
		h.k.with(func() { v.superRO = false })
		h.ok(stage("v"), publish("v", 1))
		h.atRest("v")
		h.wantCalls(0, opUnmount, targetPath("v", 1))
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

// What a stage leaves open is what the volume is formatted as, else what it was created for.
func TestChosenType(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "ext4")
		h.ok(stage("v", stageOpen))
		if s := h.store.Get("v").Stage; s.Capability.FSType != "ext4" {
			t.Errorf("staged as %s", s.Capability.FSType)
		}
		h.volume("c").created = "ext4"
		h.ok(stage("c", stageOpen))
		if s := h.store.Get("c").Stage; s.Capability.FSType != "ext4" {
			t.Errorf("staged as %s what was created for ext4", s.Capability.FSType)
		}
		h.refuse(h.do(stage("x", stageOpen)), state.NotFound, "no such volume")
	})
}

// Mount options that the kernel refuses are told before anything is done to the
// volume, whether the type of file system was asked for or chosen.
func TestRefusedOptions(t *testing.T) {
	for title, open := range map[string]bool{"asked for": false, "chosen": true} {
		t.Run(title, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				v.created = "ext4"
				before := h.k.changes()
				h.refuse(h.do(stage("v", func(s *state.Stage) {
					s.Capability.Flags = []string{"bad-for-ext4"}
					if open {
						s.Capability.FSType = ""
					}
				})), state.InvalidArgument, "volume v", "does not know the option")
				if h.store.Get("v") != nil || h.k.changes() != before {
					t.Errorf("left is %s after %d changes", marshal(h.store.Get("v")), h.k.changes()-before)
				}
				h.ok(stage("v"))
			})
		})
	}
}
