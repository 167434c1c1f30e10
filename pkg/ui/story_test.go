package ui

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
)

func texts(moments []moment) []string {
	var all []string
	for _, m := range moments {
		all = append(all, m.Text)
	}
	return all
}

func TestStory(t *testing.T) {
	begin := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	at := func(minutes int) time.Time { return begin.Add(time.Duration(minutes) * time.Minute) }
	stage := func(is report.Condition, err string) report.PartStatus {
		return report.PartStatus{Part: "stage", Path: "/x", Asked: "staged at /x as ext4", Is: is, Error: err, Since: at(0)}
	}
	target := report.PartStatus{Part: "target /y", Pod: "default/writer", Asked: "published", Is: report.Waiting, Since: at(1)}
	on := func(parts ...report.PartStatus) []report.NodeOf {
		return []report.NodeOf{{Name: "n", Node: report.Node{Volumes: []report.Status{{Volume: "v", Parts: parts}}}}}
	}
	s := stories{}
	tell := func(nodes []report.NodeOf) []string {
		return texts(s.tell(nodes[0], nodes[0].Volumes[0], report.Refusal{}))
	}
	must := func(got []string, want ...string) {
		t.Helper()
		if !slices.Equal(got, want) {
			t.Errorf("the story is %q, not %q", got, want)
		}
	}
	now := on(stage(report.UnderWay, ""))
	s.note(now, at(2))
	must(tell(now), "Asked of stage: staged as ext4")

	now = on(stage(report.UnderWay, ""))
	now[0].Volumes[0].Step = &report.StepStatus{Step: "Format", Age: time.Minute}
	s.note(now, at(3)) // the same, and a step
	s.note(now, at(4))
	must(tell(now), "Format began", "Asked of stage: staged as ext4")

	now = on(stage(report.Failing, "volume v:  no\nroom"), target)
	s.note(now, at(5))
	must(tell(now), "stage is failing: no room", "default/writer is waiting", "Format began", "Asked of default/writer: published", "Asked of stage: staged as ext4")

	// A node that does not answer tells nothing, not even that its volumes are gone.
	s.note([]report.NodeOf{{Name: "n", Error: "away"}}, at(6))
	must(tell(now)[:1], "stage is failing: no room")

	settled := stage(report.Settled, "")
	settled.Lost = at(7)
	now = on(settled)
	s.note(now, at(8))
	must(tell(now)[:3], "stage is settled", "default/writer: nothing is asked any more", "stage was lost, not by the plugin's doing")

	refused := report.Refusal{Volume: "v", Call: "NodePublishVolume", Code: "AlreadyExists", Error: "volume v: other flags", At: at(9)}
	must(texts(s.tell(now[0], now[0].Volumes[0], refused))[:1], "NodePublishVolume was refused with AlreadyExists: other flags")

	// A volume that goes and comes back has its story, and one that stays away has none.
	s.note([]report.NodeOf{{Name: "n"}}, at(10))
	s.note(now, at(11))
	must(tell(now)[:2], "stage is settled", "stage: nothing is asked any more")
	s.note([]report.NodeOf{{Name: "n"}}, at(12))
	s.note([]report.NodeOf{{Name: "n"}}, at(12+61))
	if len(s) != 0 {
		t.Errorf("%d stories are kept of volumes that are long gone", len(s))
	}
}

func TestStoryIsBounded(t *testing.T) {
	s := stories{}
	var now []report.NodeOf
	for i := range 3 * mostMoments {
		now = []report.NodeOf{{Name: "n", Node: report.Node{Volumes: []report.Status{{Volume: "v", Parts: []report.PartStatus{{Part: "stage", Is: report.Failing, Error: fmt.Sprint(i)}}}}}}}
		s.note(now, time.Unix(int64(i), 0))
	}
	told := texts(s.tell(now[0], now[0].Volumes[0], report.Refusal{}))
	if len(told) != mostMoments || told[0] != fmt.Sprintf("stage is failing: %d", 3*mostMoments-1) {
		t.Errorf("%d moments are told, the last is %q", len(told), told[0])
	}
}
