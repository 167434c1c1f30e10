package reconciler

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// tells checks that the explanation of a volume has the words in the parts where they
// belong.
func (h *harness) tells(id string, want map[string][]string) {
	h.t.Helper()
	told, err := h.p.r.Explain(context.Background(), id)
	require.NoError(h.t, err)
	explanation := told.Explanation()
	parts := map[string][]string{
		"asked": explanation.Asked, "is": explanation.Is, "missing": explanation.Missing, "next": explanation.Next, "in the way": explanation.InTheWay, "you can": explanation.YouCan,
	}
	for part, sentences := range parts {
		text := strings.Join(sentences, "\n")
		for _, words := range want[part] {
			if !strings.Contains(text, words) {
				h.t.Errorf("%s: no %q in %q", part, words, text)
			}
		}
		if len(want[part]) == 0 && text != "" {
			h.t.Errorf("%s: %q, want nothing", part, text)
		}
		for _, sentence := range sentences {
			if !strings.HasSuffix(sentence, ".") || strings.Contains(sentence, "\n") {
				h.t.Errorf("%s: %q is no sentence", part, sentence)
			}
		}
	}
}

func TestExplainWhatIsAsAsked(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS), publish("v", 1, publishXFS, publishReadOnly), resize("v", 2*gib))
		h.sleep(90 * time.Second)
		h.tells("v", map[string][]string{
			"asked":   {"NodeStageVolume asked 1m30s ago", stagePath("v"), "NodePublishVolume asked 1m30s ago", targetPath("v", 1) + ", read-only", "NodeExpandVolume asked", "that it has 2Gi"},
			"is":      {"/pool/v", "formatted as xfs", "/dev/loop1 (7:1) is attached", "At " + stagePath("v") + " is mounted", "At " + targetPath("v", 1) + " is mounted", "with ro"},
			"you can": {"Nothing is left to do"},
		})
	})
}

func TestPodsAreNamed(t *testing.T) {
	bubble(t, func(h *harness) {
		h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS), publish("v", 1, publishXFS, func(t *state.Target) {
			t.Context = map[string]string{"csi.storage.k8s.io/pod.namespace": "default", "csi.storage.k8s.io/pod.name": "writer"}
		}))
		h.tells("v", map[string][]string{
			"asked":   {"published at " + targetPath("v", 1) + " for pod default/writer, read-write"},
			"is":      {"At " + targetPath("v", 1) + " is mounted"},
			"you can": {"Nothing is left to do"},
		})
		target, stage := report.Statuses(h.p.r.Reports())[0].Parts[0], report.Statuses(h.p.r.Reports())[0].Parts[1]
		if target.Pod != "default/writer" || target.Path != targetPath("v", 1) || stage.Pod != "" || stage.Path != stagePath("v") {
			t.Errorf("status tells %+v and %+v", target, stage)
		}
	})
}

func TestExplainWhatIsTakenDown(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.volume("v")
		h.ok(stage("v"), publish("v", 1))
		h.k.fail(opUnmount, targetPath("v", 1), -1, errBoom)
		h.refuse(h.do(unpublish("v", 1)), state.Unavailable)
		h.refuse(h.do(unstage("v")), state.Unavailable)
		h.tells("v", map[string][]string{
			"asked":      {"NodeUnstageVolume asked", "NodeUnpublishVolume, or the end of the pod, asked"},
			"is":         {"At " + stagePath("v") + " is mounted"},
			"missing":    {"Stage: it should be gone", "Target " + targetPath("v", 1) + ": it should be gone"},
			"in the way": {"boom", "Stage waits for target"},
			"next":       {"Unbind for target"},
			"you can":    {"csi-node volume retry v"},
		})
		h.k.mend()
		h.sleep(10 * time.Minute)
		h.tells("v", map[string][]string{
			"asked":   {"Nothing is asked of it"},
			"is":      {"It is not attached"},
			"you can": {"Nothing is left to do"},
		})
		h.k.with(func() { v.device = &fakeDevice{number: h.k.number(), size: gib} })
		h.tells("v", map[string][]string{
			"asked":   {"Nothing is asked of it"},
			"is":      {"is attached and shows it read-write"},
			"you can": {"csi-node orphans --clean"},
		})
	})
}

// A volume is explained even if a look at it hangs.
func TestExplainAHungVolume(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.k.hang(opFind, "v", true)
		h.tells("v", map[string][]string{
			"asked":      {"NodeStageVolume"},
			"is":         {"At " + stagePath("v") + " is mounted"},
			"in the way": {"cannot be looked at now"},
			"you can":    {"csi-node volume retry v"},
		})
	})
}

func TestExplainAStranger(t *testing.T) {
	bubble(t, func(h *harness) {
		_, err := h.p.r.Explain(context.Background(), "stranger")
		h.refuse(err, state.NotFound, "stranger")
	})
}

// A plan with which nothing remains to be done is not kept, and made again for a report;
// of what could not be observed since, nothing is claimed.
func TestReportAtRest(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		h.sleep(time.Second)
		condition := func() report.Condition {
			s := report.Statuses(h.p.r.Reports())
			return s[0].Parts[0].Is
		}
		if is := condition(); is != report.Settled {
			t.Errorf("at rest: %s", is)
		}
		h.k.fail(opFind, "v", -1, errBoom)
		h.p.r.Changed(stagePath("v"))
		h.sleep(time.Second)
		if is := condition(); is != report.Failing {
			t.Errorf("after a look that failed: %s", is)
		}
	})
}

func TestInspectActsOnNothing(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.volume("w")
		h.ok(stage("v"), publish("v", 1), stage("w"))
		h.kill()
		h.k.with(func() { delete(h.k.mounts, targetPath("v", 1)) })
		h.k.fail(opFind, "w", -1, errBoom)
		before := h.k.changes()
		offline := &process{k: h.k, end: func() {}, done: make(chan struct{})}
		r := New(Config{Store: h.store, Kernel: offline.kernel()})
		r.Inspect(context.Background())
		ended, end := context.WithCancel(context.Background())
		end()
		r.Run(ended)
		conditions := map[string]report.Condition{}
		for _, s := range report.Statuses(r.Reports()) {
			for _, p := range s.Parts {
				conditions[s.Volume+" "+p.Part] = p.Is
				if s.Volume == "w" && (!strings.Contains(p.Error, "boom") || p.NextTry != nil) {
					t.Errorf("of what cannot be looked at: %+v", p)
				}
			}
		}
		if conditions["v stage"] != report.Settled || conditions["v target "+targetPath("v", 1)] != report.UnderWay || conditions["w stage"] != report.Failing {
			t.Errorf("conditions are %v", conditions)
		}
		h.noStepSince(before)
	})
}

// However many volumes hang, who has seconds for all of them learns of each.
func TestInspectWaitsOnceForAllThatHang(t *testing.T) {
	bubble(t, func(h *harness) {
		ids := []string{"v", "w", "x"}
		for _, id := range ids {
			h.volume(id)
			h.ok(stage(id))
		}
		h.kill()
		for _, id := range ids {
			h.k.hang(opFind, id, false)
		}
		offline := &process{k: h.k, end: func() {}, done: make(chan struct{})}
		r := New(Config{Store: h.store, Kernel: offline.kernel()})
		start := time.Now()
		r.Inspect(context.Background())
		if took := time.Since(start); took > inspectTimeout {
			t.Errorf("it took %s", took)
		}
		ended, end := context.WithCancel(context.Background())
		end()
		r.Run(ended)
		for _, s := range report.Statuses(r.Reports()) {
			if s.Worst() != report.Failing {
				t.Errorf("volume %s is %s", s.Volume, s.Worst())
			}
		}
	})
}

// A growth that nobody has asked for and that fails is in the way of something, too.
func TestExplainFailingGrowth(t *testing.T) {
	bubble(t, func(h *harness) {
		v := h.formatted("v", "xfs")
		h.ok(stage("v", stageXFS), publish("v", 1, publishXFS))
		h.k.fail(opGrow, "", -1, errBoom)
		h.k.with(func() { v.device.size, v.size, v.capacity = 2*gib, 2*gib, 2*gib; h.k.drift("v") })
		h.p.r.DeviceChanged(v.device.number)
		h.sleep(time.Minute)
		if e := h.p.r.Reports()[0].Explanation(); !strings.Contains(strings.Join(e.InTheWay, " "), errBoom.Error()) {
			t.Errorf("it fails, and what is told is %+v", e)
		}
		h.k.mend()
		h.sleep(maxDelay)
		if e := h.p.r.Reports()[0].Explanation(); len(e.InTheWay) > 0 {
			t.Errorf("it has grown, and what is told is %+v", e)
		}
	})
}
