package reconciler

import (
	"errors"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// loseNumbered publishes a raw volume, whose device then goes. Its pods keep the number, and the kernel gives it to the
// next device: the lowest that is free.
func loseNumbered(h *harness) {
	lost := h.volume("lost")
	h.ok(stage("lost", stageBlock), publish("lost", 1, publishBlock))
	h.k.with(func() {
		h.k.known[targetPath("lost", 1)] = lost.device.number
		h.k.minors = lost.device.number.Minor - 1
		lost.device, lost.away = nil, true
	})
}

// The pods of a volume whose device is gone would be shown another volume that gets its number.
func TestDeviceWithTheNumberOfAnothersPublish(t *testing.T) {
	bubble(t, func(h *harness) {
		other := h.volume("other")
		loseNumbered(h)
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

// So would one that was published before, and whose own device was lost and is attached again.
func TestDeviceThatComesBackWithTheNumberOfAnothersPublish(t *testing.T) {
	bubble(t, func(h *harness) {
		other := h.volume("other")
		h.ok(stage("other", stageBlock), publish("other", 1, publishBlock))
		first := other.device.number
		loseNumbered(h)
		h.k.with(func() {
			h.k.known[targetPath("other", 1)] = first
			other.device = nil
		})
		h.wake("other")
		if other.device != nil {
			t.Errorf("it is attached as %s", other.device.number)
		}
		h.refuse(h.do(publish("other", 1, publishBlock)), state.Unavailable, "restart the pod") // with the next number
		h.ok(unpublish("lost", 1), unstage("lost"), unpublish("other", 1), unstage("other"))
		h.atRest("other")
	})
}

// While the device cannot be given back, nothing of the volume is used, and no caller is told that it is ready.
func TestDeviceWithTheNumberOfAnothersPublishThatStays(t *testing.T) {
	bubble(t, func(h *harness) {
		other := h.volume("other")
		loseNumbered(h)
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
