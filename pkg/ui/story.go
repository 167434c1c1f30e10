package ui

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/report"
)

// moment is a thing that happened to a volume.
type moment struct {
	At   time.Time        `json:"at"`
	Text string           `json:"text"`
	Is   report.Condition `json:"is"` // that a part came into; empty: none did
}

// Bounds of what is remembered.
const (
	mostMoments = 50        // of a volume
	storyAge    = time.Hour // of a volume of which nothing is asked any more
)

// stories are what differed between the readings, by volume. What a report tells by
// itself (since when something is asked, when it was lost, what was refused) is not in
// them: tell adds it.
type stories map[storyKey]*story

type storyKey struct{ node, pod, volume string }

type story struct {
	moments []moment // the oldest first
	last    report.Status
	seen    time.Time // when it was in a report
}

// note compares the nodes with what they were. A node that could not be asked stays as it
// was.
func (s stories) note(nodes []report.NodeOf, now time.Time) {
	for _, n := range nodes {
		if n.Error != "" {
			continue
		}
		there := map[string]bool{}
		for _, v := range n.Volumes {
			there[v.Volume] = true
			key := storyKey{n.Name, n.Pod, v.Volume}
			known := s[key]
			if known == nil {
				known = &story{last: v} // of what was before only the report tells
				s[key] = known
			}
			known.add(differences(known.last, v, now)...)
			known.last, known.seen = v, now
		}
		for key, known := range s {
			if key.node == n.Name && key.pod == n.Pod && !there[key.volume] {
				gone := report.Status{Volume: key.volume}
				known.add(differences(known.last, gone, now)...)
				known.last = gone
			}
		}
	}
	for key, known := range s {
		if now.Sub(known.seen) > storyAge {
			delete(s, key)
		}
	}
}

func (s *story) add(moments ...moment) {
	s.moments = append(s.moments, moments...)
	s.moments = s.moments[max(len(s.moments)-mostMoments, 0):]
}

// differences tells what became of a volume between two readings.
func differences(before, after report.Status, now time.Time) []moment {
	var all []moment
	was := map[string]report.PartStatus{}
	for _, p := range before.Parts {
		was[p.Part] = p
	}
	for _, p := range after.Parts {
		old, known := was[p.Part]
		delete(was, p.Part)
		if !known || old.Is != p.Is || old.Error != p.Error {
			text := fmt.Sprintf("%s is %s", nameOf(p), p.Is)
			if p.Error != "" {
				text += ": " + report.OneLine(p.Error, after.Volume)
			}
			all = append(all, moment{now, text, p.Is})
		}
	}
	for _, p := range before.Parts {
		if _, gone := was[p.Part]; gone {
			all = append(all, moment{now, nameOf(p) + ": nothing is asked any more", ""})
		}
	}
	if step := after.Step; step != nil && (before.Step == nil || before.Step.Step != step.Step) {
		all = append(all, moment{now.Add(-step.Age), step.Step + " began", ""})
	}
	return all
}

// tell returns what is known of a volume's past, the newest first.
func (s stories) tell(n report.NodeOf, v report.Status, refusal report.Refusal) []moment {
	all := []moment{}
	if known := s[storyKey{n.Name, n.Pod, v.Volume}]; known != nil {
		all = append(all, known.moments...)
	}
	for _, p := range v.Parts {
		if !p.Since.IsZero() {
			asked := strings.ReplaceAll(p.Asked, " at "+p.Path, "") // which is told of the part
			all = append(all, moment{p.Since, fmt.Sprintf("Asked of %s: %s", nameOf(p), asked), ""})
		}
		if !p.Lost.IsZero() {
			all = append(all, moment{p.Lost, nameOf(p) + " was lost, not by the plugin's doing", ""})
		}
	}
	if refusal.Call != "" {
		all = append(all, moment{refusal.At, fmt.Sprintf("%s was refused with %s: %s", refusal.Call, refusal.Code, refusal.Reason()), ""})
	}
	slices.SortStableFunc(all, func(a, b moment) int { return b.At.Compare(a.At) })
	return all[:min(len(all), mostMoments)]
}

// nameOf is the pod that a target is for, or what the part is.
func nameOf(p report.PartStatus) string { return cmp.Or(p.Pod, p.Part) }
