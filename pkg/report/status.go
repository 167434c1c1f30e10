package report

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Status is the report of a volume as a table shows it. The JSON is the contract
// of `csi-node status --output json`.
type Status struct {
	Volume string       `json:"volume"`
	Claim  string       `json:"claim,omitempty"`  // namespace/name, where Kubernetes was asked for it
	Class  string       `json:"class,omitempty"`  // of the claim
	Device string       `json:"device"`           // as last seen; "unknown" when it was not
	Holder string       `json:"holder,omitempty"` // who keeps a device that should go, as last seen
	Parts  []PartStatus `json:"parts"`            // targets, stage, size
	Step   *StepStatus  `json:"step,omitempty"`   // that runs now
}

// PartStatus is the report of one part.
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

// Worst returns the condition of the volume's worst part.
func (s Status) Worst() Condition {
	return worst(s.Parts, func(p PartStatus) Condition { return p.Is })
}

// Statuses renders reports for a table.
func Statuses(volumes []Volume) []Status {
	all := make([]Status, 0, len(volumes))
	for _, v := range volumes {
		all = append(all, v.Status())
	}
	return all
}

// Status renders the report for a table.
func (v Volume) Status() Status {
	s := Status{Volume: v.ID, Device: state.DeviceUnknown.String(), Parts: []PartStatus{}}
	if v.Seen {
		s.Device = deviceStatus(v.Have)
		for _, e := range v.Have.Stack() { // the highest one's
			s.Holder = cmp.Or(e.Device.Holder, s.Holder)
		}
	}
	if r := v.Running; r != nil {
		s.Step = &StepStatus{r.Step, v.Made.Sub(r.Since), r.Progress}
	}
	for _, p := range v.Parts {
		part := PartStatus{Part: p.Part.String(), Path: p.Path, Pod: p.Pod, Asked: p.Asked, Is: p.Is, Since: p.Since, Error: p.Why(), Losses: p.Losses, Lost: p.Lost}
		if !p.NextTry.IsZero() {
			part.NextTry = &p.NextTry
		}
		s.Parts = append(s.Parts, part)
	}
	return s
}

func deviceStatus(have state.Actual) string {
	if have.Source != nil {
		return fmt.Sprintf("none, it is mounted from %s (%s)", have.Source.Source, have.Source.FSType)
	}
	text := elementStatus(have.Device)
	if have.View.Present() {
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
	return fmt.Sprintf("%s %s %s %d bytes", d.Path, d.State, state.FormatAccess(d.ReadOnly), d.Size)
}
