package reconciler

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Status is desired against actual of one volume, for people. The JSON is the
// contract of `csi-node status --output json`.
type Status struct {
	Volume string       `json:"volume"`
	Device string       `json:"device"`           // as last seen; "unknown" when it was not
	Holder string       `json:"holder,omitempty"` // who keeps a device that should go, as last seen
	Parts  []PartStatus `json:"parts"`            // targets, stage, size
	Step   *StepStatus  `json:"step,omitempty"`   // that runs now
}

// PartStatus is desired against actual of one part.
type PartStatus struct {
	Part  string    `json:"part"`
	Path  string    `json:"path,omitempty"` // of a target, or where it is staged
	Pod   string    `json:"pod,omitempty"`  // that a target is for, as namespace/name
	Asked string    `json:"asked"`          // "staged at …", "gone", "gone, then staged at …"
	Is    Condition `json:"is"`
	Since time.Time `json:"since"` // it was asked
	// Error is why the part is stuck or the last attempt failed.
	Error   string     `json:"error,omitempty"`
	NextTry *time.Time `json:"nextTry,omitempty"`
	// Losses is how often in a row, each soon after the other, the part was lost and repaired.
	Losses int `json:"losses,omitempty"`
	// Lost is when the part was last lost; zero if it was not.
	Lost time.Time `json:"lost,omitzero"`
}

// StepStatus is the step that runs now.
type StepStatus struct {
	Step string        `json:"step"`
	Age  time.Duration `json:"ageNanoseconds"`
	// Progress is how far it has come, for people; empty where it does not tell.
	Progress string `json:"progress,omitempty"`
}

// Condition is how a part stands.
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

// Status returns the state of every volume with a record, in the order of
// their ids. It looks at nothing but memory.
func (r *Reconciler) Status() []Status {
	records := r.store.List()
	r.mu.Lock()
	defer r.mu.Unlock()
	all := make([]Status, 0, len(records))
	for _, record := range records {
		all = append(all, r.status(record))
	}
	return all
}

func (r *Reconciler) status(record *state.Volume) Status {
	v := r.volumes[record.ID]
	s := StatusOf(record)
	if v == nil {
		return s
	}
	if !v.unseen {
		s.Device = deviceStatus(v.have)
		for _, e := range v.have.Stack() { // the highest one's
			s.Holder = cmp.Or(e.Device.Holder, s.Holder)
		}
	}
	if !v.since.IsZero() {
		s.Step = &StepStatus{v.running.String(), time.Since(v.since), v.progress}
	}
	for i, part := range record.Parts() {
		p := &s.Parts[i]
		p.Is = v.condition(record, part)
		if a := v.attempts[part]; a != nil && a.err != nil && p.Is != Settled {
			p.Error = a.err.Error()
			if next := a.next; !next.IsZero() {
				p.NextTry = &next
			}
		}
		if p.Is == Failing && p.Error == "" { // seen, and not tried yet
			p.Error = v.plan.Verdicts[part].Problem.Text
		}
		lost := v.repairs[part]
		if lost == nil {
			continue
		}
		p.Losses, p.Lost = lost.losses, lost.met
		if v.plan.Verdicts[part].Problem != (Problem{}) {
			continue // there is no repair to put off: why not is told above
		}
		switch lost.state {
		case putOff:
			next := lost.next
			p.Is, p.NextTry = Failing, &next
			p.Error = fmt.Sprintf("lost %d times in a row, and repaired each time: something keeps undoing it", lost.losses)
		case left:
			p.Is, p.Error = Failing, "lost, and left so until somebody asks for it: repair is switched off (--heal=false)"
		}
	}
	return s
}

// Failures returns why parts of a volume failed when they were last tried, in
// the order of the record's parts.
func (r *Reconciler) Failures(id string) []PartProblem {
	record := r.store.Get(id)
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volumes[id]
	if v == nil || record == nil {
		return nil
	}
	var failures []PartProblem
	for _, part := range record.Parts() {
		if a := v.attempts[part]; a != nil && a.err != nil {
			failures = append(failures, PartProblem{part, Problem{state.ClassOf(a.err), a.err.Error()}})
		}
	}
	return failures
}

// StatusOf is the status of a record of which nothing was observed.
func StatusOf(record *state.Volume) Status {
	s := Status{Volume: record.ID, Device: "unknown"}
	for _, part := range record.Parts() {
		p := PartStatus{Part: part.String(), Asked: asked(record, part), Is: Unseen, Since: record.Intent(part).Since}
		switch part.Kind {
		case state.TargetKind:
			p.Path, p.Pod = part.Path, record.Targets[part.Path].Pod()
		case state.StageKind:
			p.Path = record.Stage.Path
		}
		s.Parts = append(s.Parts, p)
	}
	return s
}

// condition judges a part by the last look at the volume.
func (v *volume) condition(record *state.Volume, part state.Part) Condition {
	looked := v.want.Intent(part)
	verdict := v.plan.Verdicts[part]
	switch a := v.attempts[part]; {
	case a != nil && a.err != nil && !verdict.Settled, verdict.Problem != (Problem{}):
		return Failing
	case v.unseen:
		return Unseen
	case looked == nil || looked.Revision != record.Intent(part).Revision:
		return UnderWay // asked since
	case verdict.Settled:
		return Settled
	case len(verdict.Needs) > 0:
		return Waiting
	}
	return UnderWay
}

func asked(record *state.Volume, part state.Part) string {
	s, t := record.Stage, record.Targets[part.Path]
	switch part.Kind {
	case state.SizeKind:
		return fmt.Sprintf("%d bytes", record.Size.Bytes)
	case state.StageKind:
		switch {
		case s.Next != nil:
			return "gone, then " + askedStage(s.Next)
		case s.Gone:
			return "gone"
		}
		return askedStage(s)
	}
	switch {
	case t.Next != nil:
		return "gone, then " + askedTarget(t.Next)
	case t.Gone:
		return "gone"
	}
	return askedTarget(t)
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

func askedTarget(t *state.Target) string {
	if t.ReadOnly {
		return "published read-only"
	}
	return "published"
}

func deviceStatus(have state.Actual) string {
	if have.Source != nil {
		return fmt.Sprintf("none, it is mounted from %s (%s)", have.Source.Source, have.Source.FSType)
	}
	text := elementStatus(have.Device)
	if stands(have.View) {
		text += " with read-only view " + have.View.Path
	}
	if len(have.Lower) == 0 {
		return text
	}
	words := []string{have.Layer + " " + text}
	for _, e := range slices.Backward(have.Lower) {
		words = append(words, strings.TrimSpace(e.Layer+" "+elementStatus(e.Device)))
	}
	return strings.Join(words, ", on ")
}

func elementStatus(d state.Device) string {
	if d.State == state.DeviceAbsent || d.State == state.DeviceUnknown {
		return d.State.String()
	}
	return fmt.Sprintf("%s %s %s %d bytes", d.Path, d.State, access(d.ReadOnly), d.Size)
}

// Worst returns the condition of the volume's worst part.
func (s Status) Worst() Condition {
	order := Conditions()
	worst := 0
	for _, p := range s.Parts {
		worst = max(worst, slices.Index(order, p.Is))
	}
	return order[worst]
}
