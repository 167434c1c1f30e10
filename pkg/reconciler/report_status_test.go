package reconciler

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// one returns the status of the only volume.
func (h *harness) one() report.Status {
	h.t.Helper()
	synctest.Wait()
	all := report.Statuses(h.p.r.Reports())
	if len(all) != 1 {
		h.t.Fatalf("%d volumes, want 1: %+v", len(all), all)
	}
	return all[0]
}

func part(t *testing.T, s report.Status, name string) report.PartStatus {
	t.Helper()
	i := slices.IndexFunc(s.Parts, func(p report.PartStatus) bool { return p.Part == name })
	if i < 0 {
		t.Fatalf("no part %q in %+v", name, s.Parts)
	}
	return s.Parts[i]
}

func TestStatusOfAStepThatRuns(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		hang := h.k.hang(opFormat, "v", true)
		asked := time.Now()
		answer := h.begin(stage("v"))
		h.sleep(time.Minute)
		s := h.one()
		if s.Volume != "v" || s.Step == nil || s.Step.Step != "format for stage" || s.Step.Age != time.Minute {
			t.Errorf("%+v, step %+v", s, s.Step)
		}
		p := part(t, s, "stage")
		if p.Is != report.UnderWay || p.Error != "" || p.NextTry != nil || !p.Since.Equal(asked) || !strings.Contains(p.Asked, stagePath("v")) {
			t.Errorf("%+v", p)
		}
		if !strings.Contains(s.Device, "/dev/loop1 attached read-write 1073741824 bytes") {
			t.Errorf("device %q", s.Device)
		}
		hang.open()
		require.NoError(h.t, h.got(answer))
		if s := h.one(); s.Step != nil || part(t, s, "stage").Is != report.Settled || s.Worst() != report.Settled {
			t.Errorf("%+v", s)
		}
	})
}

// What was asked since the last look is not settled by what was seen before.
func TestStatusOfWhatWasAskedSince(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		hang := h.k.hang(opLook, targetPath("v", 1), true)
		answer := h.begin(unpublish("v", 1))
		if p := part(t, h.one(), "target "+targetPath("v", 1)); p.Is != report.UnderWay || p.Asked != "gone" {
			t.Errorf("%+v", p)
		}
		hang.open()
		require.NoError(h.t, h.got(answer))
	})
}

func TestStatusIsSorted(t *testing.T) {
	bubble(t, func(h *harness) {
		for _, id := range []string{"c", "a", "b"} {
			h.volume(id)
			h.ok(stage(id))
		}
		if all := report.Statuses(h.p.r.Reports()); len(all) != 3 || all[0].Volume != "a" || all[2].Volume != "c" {
			t.Errorf("%+v", all)
		}
	})
}

// Health is made of the same judgement as status, also by what only the worker saw.
func TestHealthAgreesWithStatus(t *testing.T) {
	bubble(t, func(h *harness) {
		health := func() string {
			h.t.Helper()
			synctest.Wait() // the caller of a step that failed is told before the pass has ended
			record := h.store.Get("v")
			have, err := h.p.r.Observe(h.t.Context(), record)
			require.NoError(h.t, err)
			var words []string
			for _, f := range h.p.r.Report(record, have).Health() {
				words = append(words, f.Reason+": "+f.Message)
			}
			return strings.Join(words, "; ")
		}
		v := h.volume("v")
		h.ok(stage("v"))
		if got := health(); got != "" {
			t.Errorf("a settled volume has the health %q", got)
		}
		h.k.fail(opBind, "", -1, errBoom)
		h.refuse(h.do(publish("v", 1)), state.Unavailable)
		if got := health(); !strings.HasPrefix(got, "TargetUnusable: ") || !strings.Contains(got, "boom") {
			t.Errorf("a publish that fails gives the health %q", got)
		}
		h.k.mend()
		h.ok(publish("v", 1), unpublish("v", 1))
		h.k.with(func() { v.held = true })
		h.refuse(h.do(unstage("v")), state.Unavailable)
		if got := health(); !strings.HasPrefix(got, "StageUnusable: ") || !strings.Contains(got, "pid 7 (holder)") {
			t.Errorf("a device that is held gives the health %q", got)
		}
	})
}
