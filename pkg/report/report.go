// Package report describes the state of a volume: what is asked, what is there, why,
// since when, what comes next and what a person can do. Make judges once, from facts
// that the reconciler hands over, and is pure; everything that an operator or
// kubelet sees is a rendering of its result, so that no two of them contradict
// each other:
//
//	Facts ──Make──> Volume ──> Status       csi-node status, csi-node volume retry, and their JSON
//	                       ──> Explanation  csi-node explain, and its JSON
//	                       ──> Health       NodeGetVolumeHealth
//	                       ──> Worst        the metric csi_node_volumes
//
// Read this file first, then the rendering in question: status.go, explanation.go,
// health.go.
package report

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Facts are what a report is made of.
type Facts struct {
	Want *state.Volume // the record; one without parts if nothing is asked
	Have state.Actual  // as last seen
	// Seen: the volume was observed since the plugin started.
	Seen bool
	// Looked: Have and the verdicts were observed just now, for this report. Otherwise
	// they are from the last observation by the volume's worker.
	Looked bool
	// LookErr is why the observation for this report failed; nil: it did not fail, or none
	// was made.
	LookErr error
	// Running is the step that runs now; nil: none.
	Running *Running
	Parts   map[state.Part]PartFacts
	// Planned are the steps that may run, except the one that runs.
	Planned []Planned
}

// PartFacts are the facts about one part.
type PartFacts struct {
	Verdict Verdict
	// Outdated: the part was asked for after the observation of the verdict.
	Outdated bool
	// Failure is why the last attempt failed; nil: it did not.
	Failure error
	NextTry time.Time // zero: nothing puts it off
	// Losses is how often in a row, each soon after the other, the part was lost and
	// repaired; Lost is when it was lost last.
	Losses     int
	Lost       time.Time
	Repair     Repair
	NextRepair time.Time // of one that is put off
}

// Verdict is what the planner says of a part.
type Verdict struct {
	Settled bool
	Problem string       // what stands in the way, empty: nothing
	Needs   []state.Part // that must be settled first
}

// Repair says whether a part that was lost is repaired.
type Repair int

const (
	// RepairGoesOn: it is repaired, or it was and holds again.
	RepairGoesOn Repair = iota
	// RepairPutOff: something undoes the repairs, so the next one waits.
	RepairPutOff
	// RepairOff: it is not repaired, because repair is switched off.
	RepairOff
)

// Planned is a step that may run.
type Planned struct {
	Step string
	Part state.Part
}

// Running is a step that runs.
type Running struct {
	Step     string
	Since    time.Time
	Progress string // how far it is, for people; empty where it does not tell
}

// Tell says which step runs and for how long, rounded to unit.
func (r Running) Tell(now time.Time, unit time.Duration) string {
	text := fmt.Sprintf("%s has been running for %s", r.Step, now.Sub(r.Since).Round(unit))
	if r.Progress != "" {
		text += ": " + r.Progress
	}
	return text
}

// TellSince is Tell with the moment at which the step began. It is for errors, whose text
// must be the same each time that the call is repeated.
func (r Running) TellSince() string {
	text := fmt.Sprintf("%s has been running since %s", r.Step, state.Clock(r.Since))
	if r.Progress != "" {
		text += ": " + r.Progress
	}
	return text
}

// Volume is the report of one volume.
type Volume struct {
	ID   string
	Made time.Time
	// Unattended: no plugin runs, so nothing is done about it.
	Unattended bool

	Want    *state.Volume // what is asked
	Have    state.Actual  // what is there, as last seen
	Seen    bool          // it was seen since the plugin started
	LookErr error         // why it could not be looked at for this report
	Parts   []Part        // targets, stage, size
	Running *Running      // the step that runs now; nil: none
	Next    []Next        // the steps that come then
	// Refusal is the last call for it that was refused; nil: none is remembered.
	Refusal *Refusal
}

// Part is the report of one part.
type Part struct {
	Part  state.Part
	Path  string    // of a target, or where it is staged
	Pod   string    // that a target is for, as namespace/name
	Asked string    // "staged at …", "gone", "gone, then staged at …"
	Since time.Time // it was asked
	Is    Condition
	// Refusal is why the last attempt failed, or why none is made.
	Refusal string
	// Problem is what prevents it, according to the last observation.
	Problem string
	Needs   []state.Part // that it waits for
	NextTry time.Time    // zero: nothing puts it off
	Losses  int          // see PartFacts
	Lost    time.Time
}

// Next is a step that comes next.
type Next struct {
	Step    string
	At      time.Time // zero: at once
	Failure error     // of the last attempt at what nobody has asked for; nil: none
}

// Condition is the condition of a part.
type Condition string

const (
	Settled  Condition = "settled"
	UnderWay Condition = "under way"
	Waiting  Condition = "waiting" // for another part
	Failing  Condition = "failing" // stuck, or in back-off
	Unseen   Condition = "unseen"  // not observed since the plugin started
)

// Conditions lists every Condition, the best first.
func Conditions() []Condition { return []Condition{Settled, Waiting, UnderWay, Unseen, Failing} }

// worst returns the worst of the conditions; Settled if there is none.
func worst[T any](parts []T, is func(T) Condition) Condition {
	order := Conditions()
	at := 0
	for _, p := range parts {
		at = max(at, slices.Index(order, is(p)))
	}
	return order[at]
}

// Worst returns the condition of the volume's worst part.
func (v Volume) Worst() Condition {
	return worst(v.Parts, func(p Part) Condition { return p.Is })
}

// Make judges the facts. It is pure.
func Make(f Facts, now time.Time) Volume {
	v := Volume{ID: f.Want.ID, Made: now, Want: f.Want, Have: f.Have, Seen: f.Seen || f.Looked, LookErr: f.LookErr, Running: f.Running}
	for _, part := range f.Want.Parts() {
		v.Parts = append(v.Parts, judge(f, part))
	}
	for _, step := range f.Planned {
		p := f.Parts[step.Part]
		if p.Repair == RepairOff {
			continue
		}
		at := p.NextTry
		if p.Repair == RepairPutOff && p.NextRepair.After(at) {
			at = p.NextRepair
		}
		next := Next{Step: step.Step, At: at}
		if f.Want.Intent(step.Part) == nil {
			next.Failure = p.Failure
		}
		v.Next = append(v.Next, next)
	}
	return v
}

// judge reports on one part of the record.
func judge(f Facts, part state.Part) Part {
	facts := f.Parts[part]
	p := asked(f.Want, part)
	p.Problem, p.Needs = facts.Verdict.Problem, facts.Verdict.Needs
	p.Losses, p.Lost = facts.Losses, facts.Lost
	p.Is = condition(f, part)
	if p.Is == Settled {
		return p
	}
	if facts.Failure != nil {
		p.Refusal, p.NextTry = facts.Failure.Error(), facts.NextTry
	}
	if p.Problem != "" { // then there is no repair to put off or to leave
		return p
	}
	switch facts.Repair {
	case RepairPutOff:
		p.Is, p.NextTry = Failing, facts.NextRepair
		p.Refusal = fmt.Sprintf("lost %d times in a row, and repaired each time: something keeps undoing it", facts.Losses)
	case RepairOff:
		p.Is, p.Refusal = Failing, "lost, and left so until somebody asks for it: repair is switched off (--heal=false)"
	}
	return p
}

func condition(f Facts, part state.Part) Condition {
	facts := f.Parts[part]
	verdict := facts.Verdict
	settled := verdict.Settled
	if f.Looked && f.Want.Intent(part).Gone {
		settled = false // until its worker has seen the end, too, and forgotten the intent
	}
	switch {
	case verdict.Problem != "", facts.Failure != nil && !verdict.Settled:
		return Failing
	case !f.Seen && (!f.Looked || !settled):
		return Unseen
	case facts.Outdated:
		return UnderWay
	case settled:
		return Settled
	case len(verdict.Needs) > 0:
		return Waiting
	}
	return UnderWay
}

// Why says why the part is not as asked, as far as that is known: why the last attempt
// failed, or else what prevents the next one.
func (p Part) Why() string {
	if p.Is == Failing {
		return cmp.Or(p.Refusal, p.Problem)
	}
	return p.Refusal
}

// Asked returns what is asked of each part of a record, in words. Nothing else is
// known of the parts.
func Asked(record *state.Volume) []Part {
	var parts []Part
	for _, part := range record.Parts() {
		parts = append(parts, asked(record, part))
	}
	return parts
}

func asked(record *state.Volume, part state.Part) Part {
	p := Part{Part: part, Is: Unseen, Since: record.Intent(part).Since}
	switch part.Kind {
	case state.SizeKind:
		p.Asked = askedOfSize(record.Size)
	case state.StageKind:
		p.Path, p.Asked = record.Stage.Path, askedOfStage(record.Stage)
	case state.TargetKind:
		t := record.Targets[part.Path]
		p.Path, p.Pod, p.Asked = part.Path, t.Pod(), askedOfTarget(t)
	}
	return p
}

// askedOfSize tells a size; no byte, or one, is that of a call which names none.
func askedOfSize(s *state.Size) string {
	if s.Bytes <= 1 {
		return "the size of its device"
	}
	return state.FormatSize(s.Bytes)
}

func askedOfStage(s *state.Stage) string {
	switch {
	case s.Next != nil:
		return "gone, then " + askedStage(s.Next)
	case s.Gone:
		return "gone"
	}
	return askedStage(s)
}

func askedStage(s *state.Stage) string {
	switch {
	case s.Provisional && s.Path == "":
		return "found staged"
	case s.Provisional:
		return fmt.Sprintf("found staged at %s as %s", s.Path, s.Capability)
	}
	return fmt.Sprintf("staged at %s as %s", s.Path, s.Capability)
}

func askedOfTarget(t *state.Target) string {
	switch {
	case t.Next != nil:
		return "gone, then " + askedTarget(t.Next)
	case t.Gone:
		return "gone"
	}
	return askedTarget(t)
}

func askedTarget(t *state.Target) string {
	if t.ReadOnly {
		return "published read-only"
	}
	return "published"
}

// holds reports whether any device of the plugin's is there for the volume.
func (v Volume) holds() bool {
	return slices.ContainsFunc(v.Have.Stack(), func(e state.Element) bool { return e.Device.Present() || e.Device.Stray })
}
