package reconciler

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// fakePods are the pods that are gone, by a part of the target path.
type fakePods struct {
	mu   sync.Mutex
	gone map[string]bool
	hook func(target string) // called at each look, if set
}

func (f *fakePods) Gone(target string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.hook != nil {
		f.hook(target)
	}
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

// at has a function called at each look.
func (f *fakePods) at(hook func(target string)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = hook
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
			h.sleep(podGoneGrace / 2)
			h.wake("v") // looks within the grace do not count
			pods.set("/pods/1/", false)
			h.sleep(podGoneGrace)
		}
		if m.retired != 0 {
			t.Errorf("%d retired", m.retired)
		}
		h.atRest("v")
	})
}

// Whoever asks again and again, in vain, has a pod for it, whatever the directory says.
func TestAskedPublishIsNeverMissed(t *testing.T) {
	bubble(t, func(h *harness) {
		h.pods = &fakePods{gone: map[string]bool{"/pods/3/": true}}
		m := h.published()
		h.k.fail(opBind, targetPath("v", 3), -1, errBoom)
		for range 20 {
			h.refuse(h.do(publish("v", 3)), state.Unavailable)
			h.sleep(podGoneGrace / 2)
		}
		if m.retired != 0 {
			t.Errorf("%d retired", m.retired)
		}
	})
}

// A publish that was asked for anew during the look is another pod's.
func TestLaterPublishDoesNotRetire(t *testing.T) {
	bubble(t, func(h *harness) {
		pods, path, again := &fakePods{gone: map[string]bool{}}, targetPath("v", 1), 0
		h.pods = pods
		h.published()
		pods.set("/pods/1/", true)
		h.wake("v")
		h.sleep(podGoneGrace / 2)
		pods.at(func(target string) {
			if target != path || again > 0 {
				return
			}
			again++
			_, err := h.store.Edit("v", func(v *state.Volume) error {
				next := *v.Targets[path]
				delete(v.Targets, path)
				return v.AskPublish(&next, v.Stage.Path, time.Now())
			})
			if err != nil {
				t.Error(err)
			}
		})
		h.sleep(podGoneGrace)
		pods.set("/pods/1/", false)
		if now := h.store.Get("v").Targets[path]; again != 1 || now == nil || now.Gone {
			t.Errorf("asked again %d times, the target is %+v", again, now)
		}
		h.atRest("v")
	})
}
