package reconciler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// A target has flags of its own, also when it is put right.
func TestTargetIsPutRight(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1, publishReadOnly))
		h.k.with(func() { h.k.mounts[targetPath("v", 1)][0].Attributes &^= state.ReadOnly })
		h.wake("v")
		h.k.with(func() {
			if h.k.mounts[targetPath("v", 1)][0].Attributes&state.ReadOnly == 0 {
				t.Error("a read-only target stayed writable")
			}
		})
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

// tear takes away what is mounted at a path, behind the plugin's back, and lets
// it be noticed.
func (h *harness) tear(path string) {
	h.t.Helper()
	h.k.with(func() {
		if len(h.k.mounts[path]) == 0 {
			h.t.Errorf("nothing is mounted at %s", path)
		}
		delete(h.k.mounts, path)
	})
	h.p.r.Changed(path)
	synctest.Wait()
}

// published is a volume with a stage and two targets, and what is counted.
func (h *harness) published() *countingMetrics {
	m := &countingMetrics{}
	h.metrics = m
	h.restart()
	h.volume("v")
	h.ok(stage("v"), publish("v", 1), publish("v", 2, publishReadOnly))
	synctest.Wait()
	return m
}

// As long as one mount is left, nobody is asked whether the device is held: it is, and the answer would wait for the end
// of that.
func TestLostMountsAreRestored(t *testing.T) {
	for name, test := range map[string]struct {
		torn []string
		want []state.PartKind
	}{
		"a bind":               {[]string{targetPath("v", 1)}, []state.PartKind{state.TargetKind}},
		"the stage":            {[]string{stagePath("v")}, []state.PartKind{state.StageKind}},
		"the stage and a bind": {[]string{stagePath("v"), targetPath("v", 2)}, []state.PartKind{state.StageKind, state.TargetKind}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				m := h.published()
				asked := h.k.count(opHeld, "v")
				for _, path := range test.torn {
					h.tear(path)
				}
				h.atRest("v")
				if !slices.Equal(m.repairs, test.want) {
					t.Errorf("repaired %v, want %v", m.repairs, test.want)
				}
				if again := h.k.count(opHeld, "v") - asked; again > 0 {
					t.Errorf("asked %d times whether the device is held", again)
				}
				h.ok(unpublish("v", 1), unpublish("v", 2), unstage("v"))
				h.atRest("v")
			})
		})
	}
}

// What is mounted over a directory above hides the volume.
func TestChangeAboveIsLookedAt(t *testing.T) {
	bubble(t, func(h *harness) {
		h.published()
		for path, looks := range map[string]int{
			"/k/pods/1": 1, "/k": 1, "/": 1, "/k/pods/1/v": 1, stagePath("v"): 1,
			"/k/pods/1/v/below": 0, "/k/pods/11": 0, "/k/pod": 0, "/k/stage/vv": 0, "/elsewhere": 0,
		} {
			before := h.k.count(opFind, "v")
			h.p.r.Changed(path)
			synctest.Wait()
			if n := h.k.count(opFind, "v") - before; n != looks {
				t.Errorf("a change at %s: looked %d times, want %d", path, n, looks)
			}
		}
	})
}

// The device of a raw volume is lost behind the plugin's back. That is heard by
// its number, and nobody is looked at for the devices of others.
func TestLostDeviceIsLookedAt(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.volume("other")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), stage("other", stageBlock))
		synctest.Wait()
		number := v.device.number
		told := func(number state.DeviceNumber, looks, others int) {
			t.Helper()
			before, beforeOthers := h.k.count(opFind, "v"), h.k.count(opFind, "other")
			h.p.r.DeviceChanged(number)
			synctest.Wait()
			if n, o := h.k.count(opFind, "v")-before, h.k.count(opFind, "other")-beforeOthers; n != looks || o != others {
				t.Errorf("device %s: looked %d times and at the other volume %d times, want %d and %d", number, n, o, looks, others)
			}
		}
		told(number, 1, 0)
		told(state.DeviceNumber{Major: 8, Minor: 1}, 0, 0)
		told(state.DeviceNumber{}, 0, 0)
		h.k.with(func() { v.device = nil })
		h.p.r.DeviceChanged(number)
		synctest.Wait()
		if v.device == nil {
			t.Error("the device was not attached again")
		}
		before := h.k.count(opFind, "other")
		h.p.r.AllChanged()
		synctest.Wait()
		if h.k.count(opFind, "other") == before {
			t.Error("events were lost, and a volume was not looked at")
		}
		h.ok(unpublish("v", 1), unstage("v"), unstage("other"))
		synctest.Wait()
		if len(h.p.r.volumesByDevice) > 0 {
			t.Errorf("numbers of no volume are kept: %v", h.p.r.volumesByDevice)
		}
	})
}

func TestRepairsThatAreUndoneBackOff(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Bind)
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		*times = nil
		for end := time.Now().Add(time.Hour); time.Now().Before(end); h.sleep(100 * time.Millisecond) {
			if h.k.isMounted(targetPath("v", 1)) {
				h.tear(targetPath("v", 1))
			}
		}
		if len(*times) < 30 || len(*times) > 60 {
			t.Errorf("%d repairs in an hour", len(*times))
		}
		last := (*times)[len(*times)-1].Sub((*times)[len(*times)-2])
		if last < 90*time.Second || last > 121*time.Second {
			t.Errorf("the last repairs are %s apart", last)
		}
		p := part(t, h.one(), "target "+targetPath("v", 1))
		if p.Is != report.Failing || !strings.Contains(p.Error, "undoing") || p.NextTry == nil || p.Losses < 30 {
			t.Errorf("%+v", p)
		}
		start := time.Now()
		h.ok(publish("v", 1))
		if took := time.Since(start); took >= firstDelay {
			t.Errorf("who asks waits for %s", took)
		}
		h.atRest("v")
		h.sleep(2 * lossReset)
		h.tear(targetPath("v", 1))
		h.atRest("v") // a new story
	})
}

// What undoes one repair as soon as the other is made does not keep the worker busy.
func TestRepairsThatUndoEachOtherBackOff(t *testing.T) {
	bubble(t, func(h *harness) {
		binds, other := 0, map[string]string{targetPath("v", 1): targetPath("v", 2), targetPath("v", 2): targetPath("v", 1)}
		h.hook = func(_ context.Context, _ string, step Step, moment Moment) error {
			if step.Action != Bind || moment != After {
				return nil
			}
			if binds++; binds > 2 { // both are published
				h.k.with(func() { delete(h.k.mounts, other[step.Part.Path]) })
				h.p.r.Changed(other[step.Part.Path])
			}
			return nil
		}
		h.restart()
		h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), publish("v", 2, publishBlock))
		before := binds
		h.tear(targetPath("v", 1))
		h.sleep(10 * time.Minute)
		if made := binds - before; made < 10 || made > 60 {
			t.Errorf("%d repairs in ten minutes", made)
		}
		binds = 0
	})
}

// A device goes while its volume is looked at for the first time since the start: its number is
// not known by then.
func TestDeviceLostDuringTheFirstLook(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock))
		synctest.Wait()
		number := v.device.number
		h.stop()
		h.k.slow(opLook, targetPath("v", 1), 1, time.Second)
		h.start()
		h.sleep(500 * time.Millisecond) // the device was seen
		h.k.with(func() { v.device = nil })
		h.p.r.DeviceChanged(number)
		h.sleep(time.Minute)
		if v.device == nil {
			t.Error("the device was not attached again")
		}
		if len(h.p.r.adopting) > 0 {
			t.Errorf("looked at for the first time are still %v", h.p.r.adopting)
		}
	})
}

// A record that ends between the first look at its volume and what that has shown is forgotten.
func TestRecordEndsDuringTheFirstLook(t *testing.T) {
	bubble(t, func(h *harness) {
		r := h.p.r
		r.mu.Lock()
		r.volume("v").unseen = true
		r.mu.Unlock()
		r.begin("v", Step{Action: Look})
		r.end("v")
		r.mu.Lock()
		r.forget("v")
		r.mu.Unlock()
		r.DeviceChanged(state.DeviceNumber{Major: 7}) // panics if the volume is still looked at
	})
}

func (k *fakeKernel) isMounted(path string) (yes bool) {
	k.with(func() { yes = len(k.mounts[path]) > 0 })
	return yes
}

func TestDetectOnly(t *testing.T) {
	bubble(t, func(h *harness) {
		h.detectOnly = true
		m := h.published()
		h.tear(stagePath("v"))
		h.tear(targetPath("v", 1))
		h.sleep(time.Hour)
		if h.k.isMounted(stagePath("v")) || h.k.isMounted(targetPath("v", 1)) || len(m.repairs) != 0 {
			t.Errorf("repaired %v", m.repairs)
		}
		if p := part(t, h.one(), "stage"); p.Is != report.Failing || !strings.Contains(p.Error, "--heal") {
			t.Errorf("%+v", p)
		}
		h.ok(publish("v", 2, publishReadOnly)) // needs the stage
		if !h.k.isMounted(stagePath("v")) {
			t.Error("published without a stage")
		}
		h.ok(publish("v", 1), unpublish("v", 1), unpublish("v", 2), unstage("v"))
		h.atRest("v")
	})
}

// Nothing is noticed, and a resync finds it all the same.
func TestResync(t *testing.T) {
	bubble(t, func(h *harness) {
		h.resync = 10 * time.Minute
		h.published()
		h.k.with(func() { delete(h.k.mounts, targetPath("v", 1)) })
		h.sleep(10 * time.Minute)
		h.atRest("v")
		before := h.k.count(opFind, "v")
		h.sleep(10 * time.Hour)
		if n := h.k.count(opFind, "v") - before; n < 60 || n > 76 {
			t.Errorf("%d looks in ten hours", n)
		}
		h.ok(unpublish("v", 1), unpublish("v", 2), unstage("v"))
		before = h.k.count(opFind, "v")
		h.sleep(10 * time.Hour)
		if n := h.k.count(opFind, "v") - before; n > 1 {
			t.Errorf("%d looks at a volume that nobody wants", n)
		}
	})
}

// Volumes that a start looks at all at once are not looked at all at once again.
func TestResyncIsSpreadAfterAStart(t *testing.T) {
	bubble(t, func(h *harness) {
		h.resync = 10 * time.Minute
		const volumes = 100
		ids := make([]string, volumes)
		for i := range ids {
			ids[i] = fmt.Sprintf("v%d", i)
			h.volume(ids[i])
			h.ok(stage(ids[i]))
		}
		h.restart()
		synctest.Wait()
		looks := func() (n int) {
			for _, id := range ids {
				n += h.k.count(opFind, id)
			}
			return n
		}
		for part, before := 0, looks(); part < 5; part++ {
			h.sleep(h.resync / 5)
			// A fifth of them, give or take what chance may, and in the end the first come again.
			if n := looks() - before; n < 1 || n > volumes/2 {
				t.Errorf("%d of %d volumes are looked at in part %d of 5", n, volumes, part)
			}
			before = looks()
		}
		for _, id := range ids {
			h.atRest(id)
		}
	})
}

// However many volumes there are, two a second are looked at.
func TestResyncOfManyVolumes(t *testing.T) {
	bubble(t, func(h *harness) {
		h.resync = 10 * time.Second
		h.restart()
		const volumes = 100
		for i := range volumes {
			id := fmt.Sprintf("v%d", i)
			h.volume(id)
			h.ok(stage(id))
		}
		looks := func() (n int) {
			for i := range volumes {
				n += h.k.count(opFind, fmt.Sprintf("v%d", i))
			}
			return n
		}
		before := looks()
		h.sleep(volumes / 2 * time.Second)
		if n := looks() - before; n < volumes/2 || n > volumes*3/2 {
			t.Errorf("%d looks at %d volumes in %d seconds", n, volumes, volumes/2)
		}
	})
}

// An operator who says so has what was left repaired, whoever undid it.
func TestRetryRepairs(t *testing.T) {
	bubble(t, func(h *harness) {
		h.detectOnly = true
		h.published()
		h.tear(targetPath("v", 1))
		status, err := h.p.r.Retry(h.t.Context(), "v")
		if err != nil || status.Worst() != report.Settled {
			t.Errorf("%+v, %v", status, err)
		}
		h.atRest("v")
	})
}

// What is put off, left, or waits for its second look must not be asked about
// again and again when something else is the matter by then.
func TestPutOffDoesNotSpin(t *testing.T) {
	path := targetPath("v", 1)
	undone := func(h *harness) {
		for range 6 {
			if h.k.isMounted(path) {
				h.tear(path)
			}
			h.sleep(10 * time.Millisecond)
		}
	}
	blind := func(h *harness, times int) {
		h.k.fail(opFind, "v", times, errors.New("the pool's disk fails"))
		h.p.r.Changed(path)
	}
	for name, trouble := range map[string]func(h *harness){
		"put off, and something else is mounted": func(h *harness) {
			undone(h)
			h.k.with(func() {
				h.k.mounts[path] = []fakeMount{{Mount: state.Mount{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}}
			})
			h.p.r.Changed(path)
		},
		"put off, and not to be seen":      func(h *harness) { undone(h); blind(h, -1) },
		"put off, and not seen once":       func(h *harness) { undone(h); blind(h, 1) },
		"left, and not seen once":          func(h *harness) { h.tear(path); blind(h, 1) },
		"a pod gone, and not to be seen":   func(h *harness) { h.pods.(*fakePods).set("/pods/1/", true); h.wake("v"); blind(h, -1) },
		"a pod gone, and not seen once":    func(h *harness) { h.pods.(*fakePods).set("/pods/1/", true); h.wake("v"); blind(h, 1) },
		"a pod gone, and its mount is too": func(h *harness) { h.pods.(*fakePods).set("/pods/1/", true); undone(h) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.pods = &fakePods{gone: map[string]bool{}}
				h.detectOnly = strings.HasPrefix(name, "left")
				h.published()
				trouble(h)
				before := h.k.count(opFind, "v")
				h.sleep(10 * time.Minute)
				if n := h.k.count(opFind, "v") - before; n > 20 {
					t.Errorf("%d looks in ten minutes", n)
				}
				h.k.mend()
			})
		})
	}
}

// A store was lost, and a target that only the node knows of shows the view, or
// the device: neither is detached, so that its number is given to nobody else.
func TestNodeBoundByNobodysIntentHoldsItsDevice(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock), publish("v", 2, publishBlock, publishReadOnly))
		h.stop()
		h.store = newFakeStore()
		h.start()
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock))
		h.sleep(time.Hour)
		if v.view == nil {
			t.Fatal("the view was detached beneath a target")
		}
		h.ok(unpublish("v", 1))
		h.refuse(h.do(unstage("v")), state.Unavailable, "bound at "+targetPath("v", 2))
		if v.view == nil || v.device == nil {
			t.Fatal("detached beneath a target")
		}
		h.ok(unpublish("v", 2), unstage("v"))
		h.atRest("v")
	})
}

// story has the first target lost again and again.
func (h *harness) story() {
	for range 8 {
		h.tear(targetPath("v", 1))
		h.sleep(maxDelay)
	}
}

// tearTwice loses the first target and, once it is repaired, loses it again: as
// in a new story, it is back after the shortest pause.
func (h *harness) tearTwice() {
	h.t.Helper()
	h.tear(targetPath("v", 1))
	h.tear(targetPath("v", 1))
	h.sleep(firstDelay)
	if !h.k.isMounted(targetPath("v", 1)) {
		h.t.Errorf("not repaired after %s", firstDelay)
	}
}

// A loss long after the last one starts the count again; and a new publish
// has no losses yet, whatever was lost at its path before.
func TestStoryOfLossesEnds(t *testing.T) {
	for name, end := range map[string]func(h *harness){
		"with time":       func(h *harness) { h.sleep(2 * lossReset) },
		"with its intent": func(h *harness) { h.ok(unpublish("v", 1), publish("v", 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.published()
				h.story()
				end(h)
				h.tearTwice()
				h.atRest("v")
			})
		})
	}
}

// With repair switched off, what was asked for and never stood is made all the same,
// and what is to go goes, though the caller has left.
func TestUnfinishedRequestIsNoRepair(t *testing.T) {
	for name, row := range map[string]struct {
		fails   op
		n       int // of the target
		request request
	}{
		"publish":   {opBind, 3, publish("v", 3)},
		"unpublish": {opUnmount, 1, unpublish("v", 1)},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.detectOnly = true
				h.published()
				h.k.fail(row.fails, targetPath("v", row.n), 1, errBoom)
				h.refuse(h.do(row.request), state.Unavailable)
				h.kill()
				h.start()
				h.sleep(time.Hour)
				if h.k.isMounted(targetPath("v", row.n)) != (name == "publish") {
					t.Error("it is not carried out")
				}
				h.atRest("v")
			})
		})
	}
}

// A repair that is put off is not what is told once something stands in its way.
func TestStatusOfWhatCannotBeRepairedAnyMore(t *testing.T) {
	bubble(t, func(h *harness) {
		path := targetPath("v", 1)
		h.published()
		for range 2 {
			h.tear(path)
		}
		if p := part(t, h.one(), "target "+path); !strings.Contains(p.Error, "undoing") {
			t.Errorf("put off: %+v", p)
		}
		h.k.with(func() { delete(h.k.files, path) })
		h.sleep(time.Minute)
		if p := part(t, h.one(), "target "+path); p.Is != report.Failing || !strings.Contains(p.Error, "not there any more") || p.Losses != 1 {
			t.Errorf("gone: %+v", p)
		}
	})
}
