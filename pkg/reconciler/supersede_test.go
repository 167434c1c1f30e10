package reconciler

import (
	"cmp"
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

func stageNoatime(s *state.Stage)   { s.Capability.Flags = []string{"noatime"} }
func stageContext(s *state.Stage)   { s.Context = map[string]string{"a": "1"} }
func stageOpen(s *state.Stage)      { s.Capability.FSType = "" }
func stageElsewhere(s *state.Stage) { s.Path = "/k/stage2/v" }

func publishNoatime(t *state.Target) { t.Capability.Flags = []string{"noatime"} }

// A request that contradicts one for which a caller waits is Aborted, and
// supersedes it once nobody does: what was begun is undone, and the work goes on
// though nobody asks again.
func TestContradictingStage(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFormat, "v", true)
		first := h.begin(stage("v"))
		h.pending(first)
		h.refuse(h.do(stage("v", stageNoatime)), state.Aborted, "volume v", "a caller waits")
		h.sleep(2 * time.Minute)
		h.refuse(h.got(first), state.DeadlineExceeded, "step format")
		h.refuse(h.within(10*time.Second, stage("v", stageNoatime)), state.DeadlineExceeded, "step format for stage has been running for 2m9s")
		if s := h.store.Get("v").Stage; !s.Gone || s.Next == nil || s.Next.Capability.Flags[0] != "noatime" {
			t.Errorf("the record asks for %+v", s)
		}
		if p := report.Statuses(h.p.r.Reports())[0].Parts[0]; p.Asked != "gone, then staged at /k/stage/v as mount SINGLE_NODE_MULTI_WRITER ext4 with mount flags" || p.Is == report.Settled {
			t.Errorf("the status is %+v", p)
		}
		hang.open()
		synctest.Wait()
		h.atRest("v")
		h.mustShow(stagePath("v"), state.NoAtime, true)
		if n := h.k.count(opFormat, "v"); n != 1 {
			t.Errorf("mkfs ran %d times", n)
		}
		h.ok(stage("v", stageNoatime))
		h.refuse(h.do(stage("v")), state.AlreadyExists, "staged already")
	})
}

// What takes the place of an intent is not settled because that one was seen undone.
func TestStatusOfWhatSupersedes(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFormat, "v", true)
		h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
		h.refuse(h.within(time.Second, stage("v", stageNoatime)), state.DeadlineExceeded)
		h.k.slow(opFind, "v", -1, time.Second)
		hang.open()
		for range 300 {
			h.sleep(100 * time.Millisecond)
			p := part(t, h.one(), "stage")
			if h.k.with(func() {
				if p.Is == report.Settled && strings.HasPrefix(p.Asked, "staged") && len(h.k.mounts[stagePath("v")]) == 0 {
					t.Errorf("it is told as settled, and nothing is mounted: %+v", p)
				}
			}); t.Failed() {
				return
			}
		}
		h.atRest("v")
	})
}

func (h *harness) mustShow(at string, attribute state.Attributes, want bool) {
	h.t.Helper()
	h.k.with(func() {
		if stack := h.k.mounts[at]; len(stack) != 1 || (stack[0].Attributes&attribute != 0) != want {
			h.t.Errorf("at %s is %+v, and %s should be %t", at, stack, attribute, want)
		}
	})
}

// Whatever step of a stage hangs, another request takes its place, also if the
// plugin is killed on the way.
func TestStageIsSupersededAtEachStep(t *testing.T) {
	for _, o := range []op{opFind, opAttach, opProbe, opBeginFormat, opFormat, opEndFormat, opMount} {
		for name, other := range map[string]func(*state.Stage){
			"flags": stageNoatime, "context": stageContext, "read-only": stageReadOnly, "fs type": stageXFS, "fs type left open": stageOpen,
			"block": stageBlock, "path": stageElsewhere,
		} {
			for _, killed := range []bool{false, true} {
				t.Run(string(o)+"/"+name, func(t *testing.T) {
					bubble(t, func(h *harness) {
						v := h.volume("v")
						hang := h.k.hang(o, "", !killed)
						h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
						err := h.within(time.Second, stage("v", other))
						if err != nil && state.ClassOf(err) != state.DeadlineExceeded {
							t.Fatal(err)
						}
						if killed {
							h.kill()
							h.k.mend()
							h.start()
						}
						hang.open()
						synctest.Wait()
						h.sleep(time.Minute)
						asked := stage("v", other)
						err = h.do(asked)
						formatted := v.formatted
						switch {
						case name == "read-only" && formatted == "":
							h.refuse(err, state.FailedPrecondition, "read-only access was asked for")
						case name == "block" && v.formatting:
							h.refuse(err, state.FailedPrecondition, "interrupted")
						case name == "fs type" && formatted == "ext4":
							h.refuse(err, state.FailedPrecondition, "xfs was asked for")
						case err != nil:
							t.Fatal(err)
						default:
							s, want := h.store.Get("v").Stage, stageOf(asked)
							if want.Capability.Access == state.MountAccess && want.Capability.FSType == "" {
								want.Capability.FSType = cmp.Or(formatted, "xfs")
							}
							if s.Gone || !s.Accepted || s.Next != nil || !s.SameAs(want) {
								t.Errorf("staged is %+v", s)
							}
							h.k.with(func() {
								if stack := h.k.mounts[want.Path]; want.Capability.Access == state.MountAccess && (len(stack) != 1 || (stack[0].Attributes&state.NoAtime != 0) != (name == "flags")) {
									t.Errorf("mounted is %+v", stack)
								}
							})
						}
						if name != "path" {
							h.atRest("v")
						}
						h.k.with(func() {
							if name == "path" && len(h.k.mounts[stagePath("v")]) > 0 {
								t.Error("still mounted where it was asked for first")
							}
						})
						h.ok(request{"v", state.StagePart(), func(v *state.Volume) error {
							if v.Stage == nil {
								return state.ErrNothingThere
							}
							return v.AskUnstage(v.Stage.Path, time.Now())
						}})
						h.atRest("v")
					})
				})
			}
		}
	}
}

// stageOf is the stage that a request asks for.
func stageOf(r request) *state.Stage {
	v := &state.Volume{ID: r.id}
	if err := r.edit(v); err != nil {
		panic(err)
	}
	return v.Stage
}

// The store remembers what is to be undone and what is to follow.
func TestSupersedingSurvivesAKill(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.hang(opFormat, "v", false)
		h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
		h.refuse(h.within(time.Second, stage("v", stageNoatime)), state.DeadlineExceeded)
		h.kill()
		h.k.mend()
		h.start()
		synctest.Wait()
		h.atRest("v")
		h.mustShow(stagePath("v"), state.NoAtime, true)
	})
}

// What gives way before anything was begun for it leaves nothing to undo, so no
// step is made for it.
func TestGivesWayBeforeItIsBegun(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "ext4")
		edits := 0
		h.store.edits = func(string) {
			if edits++; edits == 2 { // the worker notes that it begins
				h.store.edits = nil
				if _, err := h.store.Edit("v", stage("v", stageReadOnly).edit); err != nil {
					t.Error(err)
				}
			}
		}
		h.refuse(h.do(stage("v")), state.Aborted, "superseded")
		synctest.Wait()
		if n := h.k.count(opAttach, "v"); n != 1 {
			t.Errorf("attached %d times", n)
		}
		h.ok(stage("v", stageReadOnly))
		h.atRest("v")
	})
}

// An administrator who corrects a mount option need not delete the pod.
func TestCorrectedOption(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opMount, "", 2, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable, "boom")
		h.refuse(h.do(stage("v", stageNoatime)), state.Unavailable, "boom")
		h.ok(stage("v", func(s *state.Stage) { s.Capability.Flags = []string{"nosuid"} }))
		h.mustShow(stagePath("v"), state.NoSuid, true)
		h.mustShow(stagePath("v"), state.NoAtime, false)
		h.atRest("v")
	})
}

// While what was begun cannot be undone, nobody is told a final code.
func TestSupersededCannotBeUndone(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.k.fail(opMount, "", 1, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable, "boom")
		h.k.fail(opDetach, "", 3, state.Errorf(state.FailedPrecondition, "it is claimed"))
		h.refuse(h.do(stage("v", stageNoatime)), state.Unavailable, "taking back what an earlier request began", "it is claimed")
		h.refuse(h.do(publish("v", 1)), state.Aborted, "unstaged")
		h.sleep(time.Minute)
		h.atRest("v")
		h.mustShow(stagePath("v"), state.NoAtime, true)
	})
}

// An unstage ends what was begun and what was to take its place.
func TestUnstageOfSuperseded(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFormat, "v", true)
		h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
		next := h.begin(stage("v", stageNoatime))
		end := h.begin(unstage("v"))
		hang.open()
		h.refuse(h.got(next), state.Aborted, "superseded")
		if err := h.got(end); err != nil {
			t.Error(err)
		}
		h.atRest("v")
		if h.store.Get("v") != nil {
			t.Error("a record is left")
		}
	})
}

func TestPublishIsSuperseded(t *testing.T) {
	for _, o := range []op{opLook, opBind, opSetAttributes} {
		for name, other := range map[string]func(*state.Target){
			"flags": publishNoatime, "read-only": publishReadOnly, "context": func(t *state.Target) { t.Context = map[string]string{"a": "1"} },
		} {
			t.Run(string(o)+"/"+name, func(t *testing.T) {
				bubble(t, func(h *harness) {
					h.volume("v")
					h.ok(stage("v"))
					first := publish("v", 1, publishNoatime)
					if name == "flags" {
						first = publish("v", 1)
					}
					hang := h.k.hang(o, targetPath("v", 1), true)
					waits := h.begin(first)
					select {
					case err := <-waits: // no such step
						if err != nil {
							t.Fatal(err)
						}
						return
					default:
					}
					h.refuse(h.do(publish("v", 1, other)), state.Aborted, "a caller waits")
					h.sleep(2 * time.Minute)
					h.refuse(h.got(waits), state.DeadlineExceeded)
					h.refuse(h.within(time.Second, publish("v", 1, other)), state.DeadlineExceeded)
					hang.open()
					synctest.Wait()
					h.atRest("v")
					h.mustShow(targetPath("v", 1), state.NoAtime, name == "flags")
					h.mustShow(targetPath("v", 1), state.ReadOnly, name == "read-only")
					h.ok(publish("v", 1, other))
				})
			})
		}
	}
}

// A size for which a caller waits is not replaced beneath it.
func TestContradictingSize(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageXFS))
		hang := h.k.hang(opGrowDevice, "v", true)
		first := h.begin(resize("v", 3*gib))
		h.refuse(h.do(resize("v", 2*gib)), state.Aborted, "a caller waits")
		h.sleep(2 * time.Minute)
		h.refuse(h.got(first), state.DeadlineExceeded, "step grow-device")
		h.refuse(h.within(time.Second, resize("v", 4*gib)), state.DeadlineExceeded, "step grow-device")
		hang.open()
		synctest.Wait()
		h.atRest("v")
		if v.device.size != 4*gib {
			t.Errorf("the device has %d bytes", v.device.size)
		}
	})
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
			h.refuse(h.within(20*time.Second, r), state.DeadlineExceeded, "volume v", "step look has been running for")
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
		ctx = InTime(ctx)
		start := time.Now()
		r := publish("v", 1)
		h.refuse(h.p.r.Ensure(ctx, r.id, r.part, r.edit), state.DeadlineExceeded, "step look has been running for 18s")
		_, err := h.p.r.Observe(ctx, &state.Volume{ID: "v"})
		h.refuse(err, state.DeadlineExceeded, "volume v", "look")
		if took := time.Since(start); took != 18*time.Second {
			t.Errorf("the last answer came after %s", took)
		}
		if v := h.store.Get("v"); v == nil || !v.Stage.Provisional || v.Targets[targetPath("v", 1)] == nil {
			t.Errorf("the record is %s", marshal(v))
		}
		h.refuse(h.within(20*time.Second, r), state.DeadlineExceeded, "step look has been running for")
		answer := h.begin(r)
		h.pending(answer)
		hang.open()
		if err := <-answer; err != nil {
			t.Error(err)
		}
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"))
	})
}

// What a stage leaves open is what the volume is, else the default; and mount
// options that do not go with it are refused before anything is done.
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
		w := h.volume("w")
		bad := func(s *state.Stage) { s.Capability.FSType, s.Capability.Flags = "", []string{"bad-for-xfs"} }
		h.refuse(h.do(stage("w", bad)), state.InvalidArgument, "volume w", "does not know the option")
		if h.store.Get("w") != nil || w.device != nil || w.formatted != "" {
			t.Errorf("record %v, device %v, formatted %q are left", h.store.Get("w"), w.device, w.formatted)
		}
		h.refuse(h.do(stage("x", stageOpen)), state.NotFound, "no such volume")
	})
}

// A growth that goes over its limit is refused, and withdrawn.
func TestSizeLimit(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageXFS))
		within := func(bytes, limit int64) request {
			return request{"v", state.SizePart(), func(v *state.Volume) error { return v.AskSize(bytes, limit, time.Now()) }}
		}
		h.refuse(h.do(within(1, gib-1)), state.OutOfRange, "never shrinks")
		h.refuse(h.do(within(gib+1, gib+4095)), state.OutOfRange, "rounded")
		if h.store.Get("v").Size != nil || v.device.size != gib {
			t.Errorf("the size is %+v, the device has %d bytes", h.store.Get("v").Size, v.device.size)
		}
		h.ok(within(gib+1, gib+4096))
		if v.device.size != gib+4096 {
			t.Errorf("the device has %d bytes", v.device.size)
		}
		h.ok(within(1, 2*gib), within(gib, 0))
		h.atRest("v")
	})
}

// Pod information comes and goes with podInfoOnMount: nothing is done for it.
func TestRepublishWithPodInformation(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		pod := func(t *state.Target) {
			t.Context = map[string]string{"csi.storage.k8s.io/pod.name": "web-0", "csi.storage.k8s.io/pod.namespace": "shop"}
		}
		h.ok(stage("v"), publish("v", 1))
		changes := h.k.changes()
		h.ok(publish("v", 1, pod))
		if s := report.Statuses(h.p.r.Reports())[0].Parts[0]; s.Pod != "shop/web-0" {
			t.Errorf("the status is %+v", s)
		}
		h.ok(publish("v", 1))
		if n := h.k.changes() - changes; n != 0 {
			t.Errorf("%d changes were made", n)
		}
		h.atRest("v")
	})
}
