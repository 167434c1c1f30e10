package reconciler

import (
	"errors"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// The pods of a volume whose device is gone still have its number. Another volume that gets it would be shown to them.
func TestDeviceWithTheNumberOfAnothersPublish(t *testing.T) {
	bubble(t, func(h *harness) {
		lost, other := h.volume("lost"), h.volume("other")
		h.ok(stage("lost", stageBlock), publish("lost", 1, publishBlock))
		h.k.with(func() {
			h.k.known[targetPath("lost", 1)] = lost.device.number
			h.k.minors = lost.device.number.Minor - 1 // the kernel gives the lowest that is free
			lost.device, lost.away = nil, true
		})
		h.refuse(h.do(stage("other")), state.Unavailable, "got the number 7:", "pods have the volume lost", "Restart the pods")
		if other.device != nil {
			t.Errorf("it is still attached as %s", other.device.number)
		}
		h.ok(unpublish("lost", 1), unstage("lost"))
		h.ok(stage("other"), publish("other", 1))
		h.ok(unpublish("other", 1), unstage("other"))
		h.atRest("other")
	})
}

// While the device cannot be given back, nothing of the volume is used, and no caller is told that it is ready.
func TestDeviceWithTheNumberOfAnothersPublishThatStays(t *testing.T) {
	bubble(t, func(h *harness) {
		lost, other := h.volume("lost"), h.volume("other")
		h.ok(stage("lost", stageBlock), publish("lost", 1, publishBlock))
		h.k.with(func() {
			h.k.known[targetPath("lost", 1)] = lost.device.number
			h.k.minors = lost.device.number.Minor - 1
			lost.device, lost.away = nil, true
		})
		h.k.fail(opDetach, "other", 1000, errors.New("device or resource busy"))
		h.refuse(h.do(stage("other", stageBlock)), state.Unavailable, "pods have the volume lost", "device or resource busy")
		h.refuse(h.do(publish("other", 1, publishBlock)), state.Unavailable, "pods have the volume lost")
		if other.device == nil || h.k.isMounted(targetPath("other", 1)) {
			t.Errorf("it is not attached, or it is published: %+v", other.device)
		}
		h.ok(unpublish("lost", 1), unstage("lost"))
		h.ok(publish("other", 1, publishBlock))
		h.ok(unpublish("other", 1))
	})
}
