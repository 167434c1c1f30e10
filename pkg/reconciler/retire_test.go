package reconciler

import (
	"strings"
	"sync"
	"testing"
	"time"
)

// fakePods are the pods that are gone, by a part of the target path.
type fakePods struct {
	mu   sync.Mutex
	gone map[string]bool
}

func (f *fakePods) Gone(target string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pod, gone := range f.gone {
		if gone && strings.Contains(target, pod) {
			return true
		}
	}
	return false
}

func (f *fakePods) set(pod string, gone bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.gone[pod] = gone
}

func TestPublishesOfPodsThatAreGoneRetire(t *testing.T) {
	bubble(t, func(h *harness) {
		pods := &fakePods{gone: map[string]bool{}}
		h.pods, h.resync = pods, 10*time.Minute
		m := h.published()
		pods.set("/pods/1/", true)
		h.sleep(12 * time.Minute) // a resync, and the grace
		if record := h.store.Get("v"); len(record.Targets) != 1 || record.Targets[targetPath("v", 2)] == nil || record.Stage == nil || m.retired != 1 {
			t.Errorf("%d retired, the record is %+v", m.retired, record)
		}
		h.atRest("v")
		pods.set("/pods/2/", true)
		h.sleep(12 * time.Minute)
		h.ok(unstage("v"))
		h.atRest("v")
	})
}

// A pod that is there again at the second look was never gone.
func TestOneLookIsNotEnough(t *testing.T) {
	bubble(t, func(h *harness) {
		pods := &fakePods{gone: map[string]bool{}}
		h.pods, h.resync = pods, 10*time.Minute
		m := h.published()
		for range 20 {
			pods.set("/pods/1/", true)
			h.wake("v")
			h.sleep(grace / 2)
			h.wake("v") // looks within the grace do not count
			pods.set("/pods/1/", false)
			h.sleep(grace)
		}
		if m.retired != 0 {
			t.Errorf("%d retired", m.retired)
		}
		h.atRest("v")
	})
}

// Whoever asks for a publish has a pod for it.
func TestAskedPublishDoesNotRetire(t *testing.T) {
	bubble(t, func(h *harness) {
		h.pods = &fakePods{gone: map[string]bool{"/pods/1/": true}}
		m := h.published()
		hang := h.k.hang(opBind, targetPath("v", 3), false)
		h.ok(unpublish("v", 1))
		answer := h.begin(publish("v", 3))
		h.sleep(time.Second)
		hang.open()
		if err := h.got(answer); err != nil || m.retired != 0 {
			t.Errorf("%v, %d retired", err, m.retired)
		}
	})
}
