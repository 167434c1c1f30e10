package reconciler

import (
	"context"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// lose takes the store away, as a reader of the node would meet it.
func (h *harness) lose() {
	h.stop()
	h.store = newFakeStore()
	h.start()
}

// otherStagePath is where volume v is staged by who names another path.
const otherStagePath = "/k/stage/other/v"

func stageOther(s *state.Stage) { s.Path = otherStagePath }

// A volume that was staged at one path when the store was lost, and is staged at
// another after, is mounted at both: an unstage ends the mount at the path that it names.
func TestStagedTwiceAfterLostStore(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v", stageOther))
		h.lose()
		h.ok(stage("v"))
		if at := h.k.look(otherStagePath); len(at.Mounts) != 1 {
			t.Fatalf("at the first path is %+v", at)
		}
		h.ok(publish("v", 1))
		for range 2 {
			if err := h.do(unmount("v", otherStagePath)); err != nil {
				t.Error(err)
			}
			if at := h.k.look(otherStagePath); len(at.Mounts) > 0 || at.File != state.Directory {
				t.Errorf("unstaged, and at the path is %+v", at)
			}
			h.atRest("v")
		}
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
}

// An unstage at a path at which the volume is not staged is OK without a record, too, and in
// the way of nobody. Where nothing of the volume is mounted, the device goes.
func TestUnstageElsewhereAfterLostStore(t *testing.T) {
	unstageOther := request{"v", state.StagePart(), func(v *state.Volume) error { return v.AskUnstage(otherStagePath, time.Now()) }}
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.lose()
		before := h.k.changes()
		require.NoError(t, h.do(unstageOther))
		h.noStepSince(before)
		h.noRecord("v")
		h.ok(stage("v"), publish("v", 1))
		h.wantCalls(1, opAttach, "v")
		h.lose()
		require.NoError(t, h.do(unstageOther))
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.with(func() { h.k.unmount(stagePath("v")) })
		h.lose()
		require.NoError(t, h.do(unstageOther))
		h.atRest("v")
	})
	bubble(t, func(h *harness) { // of the stage nothing is left, so that no other unstage will come
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.with(func() { h.k.unmount(stagePath("v")) })
		h.lose()
		h.refuse(h.do(unstage("v")), state.Unavailable, "still held")
		h.ok(unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
}

// Of two unstages at once, at two paths, none is answered with what the other path is like.
func TestTwoUnstagesAfterLostStore(t *testing.T) {
	unstageOther := request{"v", state.StagePart(), func(v *state.Volume) error { return v.AskUnstage(otherStagePath, time.Now()) }}
	for name, order := range map[string][2]request{"the stage first": {unstage("v"), unstageOther}, "the other path first": {unstageOther, unstage("v")}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.volume("v")
				h.ok(stage("v"))
				h.lose()
				both := make(chan struct{})
				var busy sync.WaitGroup
				busy.Go(func() {
					require.NoError(t, h.p.r.Exclusive(context.Background(), "v", func(context.Context, *state.Volume, state.Actual) error { <-both; return nil }))
				})
				synctest.Wait()
				first := h.begin(order[0])
				synctest.Wait()
				second := h.begin(order[1])
				synctest.Wait()
				close(both)
				busy.Wait()
				require.NoError(t, <-first)
				if err := <-second; err == nil && h.k.isMounted(stagePath("v")) {
					t.Error("both are answered OK, and it is mounted")
				} else if err != nil {
					h.refuse(err, state.Aborted, "still being unstaged", "ask again")
					require.NoError(t, h.do(order[1]))
				}
				h.ok(unstage("v"))
				h.atRest("v")
			})
		})
	}
}

// An unstage takes no stage from beneath a target of which no record is left.
func TestUnstageWhilePublishedAfterLostStore(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1), publish("v", 2))
		h.lose()
		for range 2 {
			before := h.k.changes()
			h.refuse(h.do(unstage("v")), state.FailedPrecondition, "still published at "+targetPath("v", 1)+", "+targetPath("v", 2))
			h.noStepSince(before)
			h.noRecord("v")
		}
		h.ok(unpublish("v", 1))
		h.refuse(h.do(unstage("v")), state.FailedPrecondition, "still published at "+targetPath("v", 2)+": ")
		h.ok(publish("v", 3), unpublish("v", 3)) // it is staged as before
		h.lose()
		h.ok(unpublish("v", 2), unstage("v"))
		h.atRest("v")
	})
}

// Whoever was never told that it is staged at another path may go back to where it was
// staged when the store was lost: it is mounted there still, which holds the device.
func TestStagedBackAfterLostStore(t *testing.T) {
	for name, done := range map[string]bool{"before it was done": false, "when it was done": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.volume("v")
				h.ok(stage("v", stageOther))
				h.lose()
				hang := h.k.hang(opMount, stagePath("v"), true)
				h.refuse(h.within(time.Second, stage("v")), state.DeadlineExceeded)
				if done {
					hang.open()
					synctest.Wait()
				}
				back := h.begin(stage("v", stageOther))
				if !done {
					hang.open()
				}
				require.NoError(h.t, h.got(back))
				h.atRest("v")
				if at := h.k.look(stagePath("v")); len(at.Mounts) > 0 {
					t.Errorf("at the path that was given up is %+v", at)
				}
				h.wantCalls(1, opAttach, "v")
				h.ok(request{"v", state.StagePart(), func(v *state.Volume) error { return v.AskUnstage(otherStagePath, time.Now()) }})
				h.atRest("v")
			})
		})
	}
}

// A file system that is still mounted, for a pod or at another staging path of which no
// record tells, is mounted as it is: it is too late for a check.
func TestMountedUncheckedAfterLostStore(t *testing.T) {
	for name, at := range map[string]struct {
		lost  func(*harness)
		found func(*harness) error // what it is mounted for
	}{
		"at a target": {func(h *harness) {
			h.ok(stage("v"), publish("v", 1))
			h.k.with(func() { h.k.unmount(stagePath("v")) })
		}, func(h *harness) error { return h.do(publish("v", 1)) }},
		"at another staging path": {func(h *harness) { h.ok(stage("v", stageOther)) }, func(h *harness) error { return h.do(unmount("v", otherStagePath)) }},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				at.lost(h)
				h.k.with(func() { v.contents.NeedsCheck = true })
				h.lose()
				h.k.fail(opMount, "v", 1, errBoom) // then the mount is begun, and tried again
				h.refuse(h.do(stage("v")), state.Unavailable, "boom")
				h.ok(stage("v"))
				require.NoError(t, at.found(h))
				h.atRest("v")
			})
		})
	}
}

// A request that is refused takes nothing back of what it found: not the device at
// which pods are, though it took away the view that no pod is at.
func TestRefusedAfterLostStore(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), publish("v", 2, publishBlock, publishReadOnly))
		h.k.with(func() { h.k.unmount(targetPath("v", 2)) })
		h.lose()
		h.k.fail(opProbe, "v", 1, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable, "boom")
		h.sleep(time.Second) // while nobody waits
		h.refuse(h.do(stage("v")), state.FailedPrecondition, "a pod's data")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock))
		h.atRest("v")
	})
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
		h.noRecord("v")
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
		h.noRecord("v")
	})
	bubble(t, func(h *harness) { // nobody waits any more: what is asked for in earnest supersedes
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		h.refuse(h.within(20*time.Second, publish("v", 1)), state.DeadlineExceeded)
		answer := h.begin(stage("v"))
		hang.open()
		require.NoError(t, <-answer)
		h.ok(publish("v", 1))
		h.atRest("v")
	})
	bubble(t, func(h *harness) { // and an unpublish ends it
		h.volume("v")
		hang := h.k.hang(opFind, "v", true)
		h.refuse(h.within(20*time.Second, publish("v", 1)), state.DeadlineExceeded)
		answer := h.begin(unpublish("v", 1))
		hang.open()
		require.NoError(t, <-answer)
		h.sleep(time.Second)
		h.noRecord("v")
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
		require.NoError(h.t, adopt("sync"))
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

// Nothing is staged or published in a volume whose record is lost; where there
// is a record, the store decides.
func TestPathsInAVolumeWithoutARecord(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("a")
		h.volume("b")
		h.ok(stage("a"), publish("a", 1))
		h.lose()
		inside := func(path string) func(*state.Stage) { return func(s *state.Stage) { s.Path = path + "/sub" } }
		in := func(path string) func(*state.Target) { return func(t *state.Target) { t.Path = path + "/sub" } }
		publishIn := func(id, path string) request {
			r := publish(id, 9, in(path))
			r.part = state.TargetPart(path + "/sub")
			return r
		}
		for _, place := range []string{stagePath("a"), targetPath("a", 1)} {
			before := h.k.changes()
			h.refuse(h.do(stage("b", inside(place))), state.FailedPrecondition, "lies in volume a, which is mounted at "+place)
			if h.store.Get("b") != nil || h.k.changes() != before {
				t.Errorf("left is %s after %d changes", marshal(h.store.Get("b")), h.k.changes()-before)
			}
		}
		h.ok(stage("b"))
		h.refuse(h.do(publishIn("b", targetPath("a", 1))), state.FailedPrecondition, "lies in volume a")
		h.refuse(h.do(publishIn("a", targetPath("a", 1))), state.FailedPrecondition, "lies in volume a")
		if v := h.store.Get("b"); len(v.Targets) > 0 {
			t.Errorf("left is %s", marshal(v))
		}
		h.ok(publish("a", 1), publish("b", 1))
		h.atRest("a")
		h.atRest("b")
	})
}

// An unpublish at a path in the data of a volume, be it another one's, one that nobody
// knows, or one whose record is lost, removes nothing of the data.
func TestUnpublishInAVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("a")
		h.volume("b")
		h.ok(stage("a"), publish("a", 1))
		ask := func(id string, kind state.FileType, full bool) {
			t.Helper()
			at := targetPath("a", 1) + "/sub"
			h.k.with(func() { h.k.files[at] = &fakeFile{kind: kind, inUse: full} })
			require.NoError(t, h.do(request{id, state.TargetPart(at), func(v *state.Volume) error { return v.AskUnpublish(at, time.Now()) }}))
			if h.k.look(at).File != kind {
				t.Errorf("an unpublish of %s removed %s", id, kind)
			}
			if id != "a" {
				h.noRecord(id)
			}
		}
		for _, lost := range []bool{false, true} {
			for _, id := range []string{"a", "b", "unknown"} {
				ask(id, state.Directory, false)
				ask(id, state.RegularFile, false)
				ask(id, state.Directory, true)
			}
			if !lost {
				h.lose()
			}
		}
		h.k.with(func() { delete(h.k.files, targetPath("a", 1)+"/sub") })
		h.ok(unpublish("a", 1), unstage("a"))
	})
}

// The backend of an adopted stage is found out once, and remembered.
func TestAdoptedStageRemembersItsBackend(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.lose()
		h.p.r.kernel.Devices = devices.NewSet("pool", map[string]devices.Backend{"pool": fakeDevices{h.p}})
		h.ok(publish("v", 1))
		if v := h.store.Get("v"); v.Backend != "pool" {
			t.Errorf("the record is %s", marshal(v))
		}
	})
}

// After the loss of the store a publish ends, and with it the record of a volume
// whose device stands.
func TestDeviceOfAForgottenVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.kill()
		h.store = newFakeStore() // lost
		h.start()
		h.ok(unpublish("v", 1))
		synctest.Wait()
		h.forgotten("v")
		if len(h.p.r.volumesByDevice) > 0 {
			t.Errorf("numbers of no volume are kept: %v", h.p.r.volumesByDevice)
		}
	})
}
