package reconciler

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func TestGrowth(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS), publish("v", 1, publishXFS), resize("v", gib+1))
		if v.device.size != gib+4096 {
			t.Errorf("sizes are rounded up, and the device has %d bytes", v.device.size)
		}
		h.ok(resize("v", 2*gib))
		if v.contents.Size != 2*gib || v.size != 2*gib {
			t.Errorf("file system %d, backing %d bytes", v.contents.Size, v.size)
		}
		before := h.k.changes()
		h.ok(resize("v", 2*gib), resize("v", gib))
		h.noStepSince(before)
		h.atRest("v")
		h.ok(unpublish("v", 1), unstage("v"), stage("v", stageXFS))
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
		require.NoError(t, h.p.r.ensure(context.Background(), "v", w, growth("v", stagePath("v"), mountCapability()).edit))
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

// Whoever asks for a size after the store was lost names no layer, and gets the bytes that
// were asked for all the same: what the layer takes is added to them.
func TestGrowthOfALayerAfterLostStore(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.layer = &fakeLayer{} })
		h.p.r.Remember("v", map[string]string{layerKey: rightKey})
		h.ok(stage("v", stageXFS, stageLayer))
		h.lose()
		h.p.r.Remember("v", map[string]string{layerKey: rightKey})
		for _, bytes := range []int64{2 * gib, 2*gib + 1, 3 * gib} {
			got, err := h.p.r.EnsureSize(context.Background(), "v", func(v *state.Volume) error {
				c := mountCapability()
				c.FSType = "xfs"
				if err := v.Presume(stagePath("v"), c, nil, time.Now()); err != nil {
					return err
				}
				return v.AskSize(bytes, bytes+4096, time.Now())
			})
			if err != nil || got < bytes || got > bytes+4096 || v.contents.Size != got {
				t.Errorf("asked for %d bytes, it has %d, and a file system of %d (%v)", bytes, got, v.contents.Size, err)
			}
		}
		h.atRest("v")
	})
}
