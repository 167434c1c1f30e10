package reconciler

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// A layer that needs a secret waits for one, without trying. A wrong one is tried once,
// until somebody asks again; and nothing needs one that is as asked.
func TestSecretOfALayer(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.layer = &fakeLayer{} })
		staged, published := stage("v", stageLayer), publish("v", 1, publishLayer)
		opens := func(want int) {
			t.Helper()
			h.wantCalls(want, opOpenLayer, "v")
		}
		key := func(value string) { // as an edit does, so the volume is not forgotten meanwhile
			synctest.Wait()
			h.p.r.Remember("v", map[string]string{layerKey: value})
		}

		h.refuse(h.do(staged), state.Unavailable, "waits for its secret")
		opens(0)
		key("wrong")
		h.refuse(h.do(staged), state.Unauthenticated)
		key(rightKey)
		h.ok(staged, published)
		opens(2)

		h.restart() // the secret is forgotten
		h.ok(published)
		h.k.with(func() {
			clear(h.k.mounts)
			v.layer.device, v.device = nil, nil
		})
		h.refuse(h.do(published), state.Unavailable, "if the StorageClass or the PersistentVolume names it (csi.storage.k8s.io/node-stage-secret-name")
		opens(2)
		key("wrong")
		h.refuse(h.do(published), state.Unavailable, "does not fit")
		opens(3)
		h.wake("v")
		_, _ = h.retry("v") // nobody named another one
		h.sleep(time.Hour)
		opens(3)
		key(rightKey)
		h.ok(published, unpublish("v", 1), unstage("v"))
		h.atRest("v")
	})
}

// A secret that comes while a step fails with another one is tried.
func TestSecretThatComesDuringAnAttempt(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.k.with(func() { v.layer = &fakeLayer{} })
		h.k.slow(opOpenLayer, "v", 1, 5*time.Second)
		key := func(value string) { h.p.r.Remember("v", map[string]string{layerKey: value}) }
		staged := stage("v", stageLayer)
		h.refuse(h.do(staged), state.Unavailable, "waits for its secret")
		key("wrong")
		h.refuse(h.within(2*time.Second, staged), state.DeadlineExceeded)
		h.sleep(time.Second)
		key(rightKey)
		h.ok(staged, unstage("v"))
		h.wantCalls(2, opOpenLayer, "v")
		h.atRest("v")
	})
}
