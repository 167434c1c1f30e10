package reconciler

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
)

func TestOrphanIsDetachedWhenNobodyUsesIt(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		ask := func(detach, orphan bool, want string) {
			t.Helper()
			is, kept, err := h.p.r.unasked(context.Background(), "v", detach)
			if err != nil || is != orphan || !strings.Contains(kept, want) || want == "" && kept != "" {
				t.Errorf("an orphan: %t, kept because %q (%v), want %t and %q", is, kept, err, orphan, want)
			}
		}
		ask(true, false, "")
		h.ok(stage("v", stageBlock), publish("v", 1, publishBlock, publishReadOnly))
		ask(true, false, "")
		h.stop()
		h.store = newFakeStore() // lost
		h.start()
		ask(true, true, "bound at "+targetPath("v", 1))
		h.k.with(func() { delete(h.k.mounts, targetPath("v", 1)); v.held = true })
		ask(true, true, "pid 7")
		h.k.with(func() { v.held = false })
		ask(false, true, "")
		h.k.with(func() {
			if v.device == nil || v.view == nil {
				t.Error("detached without leave")
			}
		})
		ask(true, true, "")
		h.k.with(func() {
			if v.device != nil || v.view != nil {
				t.Error("still attached")
			}
		})
		synctest.Wait()
		h.p.r.mu.Lock()
		defer h.p.r.mu.Unlock()
		if len(h.p.r.volumes) > 0 {
			t.Error("the volume is kept in memory")
		}
	})
}
