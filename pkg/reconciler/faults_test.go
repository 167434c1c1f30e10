package reconciler

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// A step that fails for good after its caller has gone withdraws nothing: there
// is nobody to tell.
func TestFinalFailureWithoutACallerKeepsTheIntent(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		f := h.k.fault(&fault{op: opBind, times: 1, mode: fails, err: state.Errorf(state.FailedPrecondition, "no parent"), hang: make(chan struct{}), deaf: true})
		ctx, cancel := context.WithCancel(context.Background())
		answer := make(chan error, 1)
		r := publish("v", 1)
		go func() { answer <- h.p.r.Ensure(ctx, r.id, r.part, r.edit) }()
		synctest.Wait()
		cancel()
		h.refuse(h.got(answer), state.Canceled)
		f.open()
		h.sleep(time.Minute)
		if target := h.store.Get("v").Targets[targetPath("v", 1)]; target == nil || !target.Accepted {
			t.Errorf("the target is %+v", target)
		}
		h.atRest("v")
	})
}

// What was seen to hold is answered once the record says so.
func TestNobodyIsToldWhatIsNotWritten(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "ext4")
		commits := 0
		h.store.fail = func(string) error {
			if commits++; commits == 3 { // the intent, that it is begun, that it holds
				return errBoom
			}
			return nil
		}
		h.refuse(h.do(stage("v")), state.Unavailable, "writing the record", "boom")
		h.ok(stage("v"))
		h.atRest("v")
	})
}

func TestStepInBackOffWaits(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.fail(opBind, targetPath("v", 1), -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		h.ok(publish("v", 2), publish("v", 3))
		if n := h.k.count(opBind, targetPath("v", 1)); n != 1 {
			t.Errorf("%d attempts while others were published, want 1", n)
		}
	})
}

func TestPublishKicksItsStage(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Mount)
		h.volume("v")
		h.k.fail(opMount, "", -1, errBoom)
		h.refuse(h.do(stage("v")), state.Unavailable)
		h.sleep(time.Hour)
		before := len(*times)
		h.refuse(h.got(h.begin(publish("v", 1))), state.Unavailable, "boom")
		if n := len(*times) - before; n != 1 {
			t.Errorf("%d attempts to mount for a publish, want 1", n)
		}
	})
}

func TestUnstageKicksItsTargets(t *testing.T) {
	bubble(t, func(h *harness) {
		times := h.attempts(Unbind)
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.fail(opUnmount, targetPath("v", 1), -1, errBoom)
		h.refuse(h.do(unpublish("v", 1)), state.Unavailable)
		h.sleep(time.Hour)
		before := len(*times)
		h.refuse(h.got(h.begin(unstage("v"))), state.Unavailable, "boom")
		if n := len(*times) - before; n != 1 {
			t.Errorf("%d attempts to unbind for an unstage, want 1", n)
		}
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

// The edit of a call that has ended would land after that of a later one.
func TestEndedCallAsksNothing(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		r := stage("v")
		h.refuse(h.p.r.Ensure(ctx, r.id, r.part, r.edit), state.Canceled, "nothing was asked")
		if v := h.store.Get("v"); v != nil {
			t.Errorf("the record is %+v", v)
		}
	})
}

func TestAdoptedIsAccepted(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.stop()
		h.store = newFakeStore() // lost
		h.start()
		h.k.fault(&fault{op: opFind, times: 1}) // the look before the adoption
		h.k.fail(opFind, "v", 1, errBoom)       // and the one after it
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		if s := h.store.Get("v").Stage; !s.Adopted || s.Provisional || !s.Accepted {
			t.Errorf("what stood before the call could be withdrawn: %+v", s)
		}
	})
}

// askedDevices says that the view is held, and that nothing else is.
type askedDevices struct{ fakeDevices }

func (askedDevices) Held(_ context.Context, d state.Device) (bool, error) { return d.ReadOnly, nil }

// askedFilesystems remembers where probes were told that the volume is mounted.
type askedFilesystems struct {
	fakeFilesystems
	mountpoints *[]string
}

func (f askedFilesystems) Probe(ctx context.Context, d state.Device, mountpoint string) (state.Contents, error) {
	*f.mountpoints = append(*f.mountpoints, mountpoint)
	return f.fakeFilesystems.Probe(ctx, d, mountpoint)
}

// What a look asks of the kernel, and what it does not.
func TestLookAsksWhatThePlanNeeds(t *testing.T) {
	ctx := context.Background()
	look := func(k Kernel, want *state.Volume) state.Actual {
		r := New(Config{Store: newFakeStore(), Kernel: k})
		defer r.queue.ShutDown()
		have, err := r.observeAlone(ctx, want)
		if err != nil {
			t.Fatal(err)
		}
		return have
	}
	t.Run("block", func(t *testing.T) {
		bubble(t, func(h *harness) {
			v := h.volume("v")
			h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly))
			if n := h.k.count(opProbe, "v"); n != 0 {
				t.Errorf("a raw block volume was read %d times", n)
			}
			k := h.p.kernel()
			asked := askedDevices{fakeDevices{h.p}}
			k.Devices, k.Views = asked, asked
			if have := look(k, h.store.Get("v")); !have.View.Held || have.Device.Held {
				t.Errorf("held: view %t, device %t", have.View.Held, have.Device.Held)
			}
			h.k.with(func() { v.device.detaching = true })
			if have := look(k, h.store.Get("v")); have.View.State != state.DeviceAttached {
				t.Errorf("the view of a device on its way out is %s", have.View.State)
			}
			h.k.with(func() { v.device.detaching = false })
		})
	})
	t.Run("mount", func(t *testing.T) {
		bubble(t, func(h *harness) {
			v := h.volume("v")
			h.ok(stage("v"))
			record := h.store.Get("v")
			var mountpoints []string
			k := h.p.kernel()
			k.Filesystems = askedFilesystems{fakeFilesystems{h.p}, &mountpoints}
			look(k, record)
			h.k.with(func() { delete(h.k.mounts, stagePath("v")) })
			look(k, record)
			if len(mountpoints) != 2 || mountpoints[0] != stagePath("v") || mountpoints[1] != "" {
				t.Errorf("probed with the mount points %q", mountpoints)
			}
			record.Stage.Gone = true
			h.k.with(func() { v.held = true })
			if have := look(k, record); have.Device.Holder != "pid 7 (holder)" {
				t.Errorf("the holder of a device that is to go is %q", have.Device.Holder)
			}
			h.k.with(func() { v.held = false })
		})
	})
}

// A target that cannot be looked at may show the view still.
func TestViewOfAnUnseenTargetStays(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly))
		h.k.fail(opLook, targetPath("v", 1), 1, errBoom)
		h.refuse(h.do(unpublish("v", 1)), state.Unavailable, "boom")
		if n := h.k.count(opDetachView, "v"); n != 0 {
			t.Errorf("the view was detached %d times", n)
		}
		h.ok(unpublish("v", 1))
		h.atRest("v")
	})
}

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
