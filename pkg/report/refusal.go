package report

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Refusal is the last call for a volume that was answered with an error which ends
// it. A plugin remembers it for a while: such a call leaves no intent behind.
type Refusal struct {
	Volume string    `json:"volume"`
	Call   string    `json:"call"`            // such as NodeStageVolume
	Path   string    `json:"path,omitempty"`  // that the call named
	Pod    string    `json:"pod,omitempty"`   // that the call was for, as namespace/name; only of a publish
	Claim  string    `json:"claim,omitempty"` // of the volume, likewise, where it is known
	Class  string    `json:"class,omitempty"` // of the claim
	Code   string    `json:"code"`            // such as InvalidArgument
	Error  string    `json:"error"`
	Since  time.Time `json:"since"` // of the first of those that were answered the same in a row
	At     time.Time `json:"at"`    // of the last
	Times  int       `json:"times"` // how many they are
}

// Tells reports whether a part of the volume already shows the refusal, because the call's
// intent is still worked on and its last attempt failed with the same error.
func (v Volume) Tells(r Refusal) bool {
	return slices.ContainsFunc(v.Parts, func(p Part) bool { return p.Why() == r.Error })
}

// Tell says which call was refused, when and why, in one line.
func (r Refusal) Tell(now time.Time) string {
	call := r.Call
	if r.Pod != "" {
		call += " for pod " + r.Pod
	}
	text := fmt.Sprintf("%s was refused %s with %s", call, ago(r.At, now), r.Code)
	if r.Times > 1 {
		text += fmt.Sprintf(", %d times since %s", r.Times, ago(r.Since, now))
	}
	return text + ": " + r.Reason()
}

// Reason is the error in one line, without the name of the volume.
func (r Refusal) Reason() string { return OneLine(r.Error, r.Volume) }

// OneLine is an error without line breaks and without the name of its volume.
func OneLine(text, volume string) string {
	return strings.TrimPrefix(strings.Join(strings.Fields(text), " "), "volume "+volume+": ")
}

const refusedTitle = "\nCalls that were refused, the last one of each volume:\n"

// mostNamed is how many of the volumes are named whose calls were refused alike.
const mostNamed = 3

// tellRefusals says which calls were refused, in a line for each volume; or, unless each is
// wanted, for all volumes whose calls were refused alike, with the time of the last.
func tellRefusals(all []Refusal, each bool, now time.Time) (lines []string) {
	type kind struct{ call, code, reason string }
	alike := map[kind][]Refusal{}
	for _, r := range all {
		k := kind{r.Call, r.Code, r.Reason()}
		alike[k] = append(alike[k], r)
	}
	for _, r := range all {
		k := kind{r.Call, r.Code, r.Reason()}
		switch others := alike[k]; {
		case len(others) == 0: // told with the first of them
		case each || len(others) == 1:
			lines = append(lines, fmt.Sprintf("volume %s: %s", inFull(r.Volume, r.Claim), r.Tell(now)))
		default:
			lines = append(lines, tellAlike(others, now))
			delete(alike, k)
		}
	}
	return lines
}

// tellAlike is tellRefusals for those that differ in the volume, the pod and the time.
func tellAlike(all []Refusal, now time.Time) string {
	last := slices.MaxFunc(all, func(a, b Refusal) int { return a.At.Compare(b.At) })
	last.Pod, last.Times = "", 1
	var names []string
	for _, r := range all[:min(len(all), mostNamed)] {
		who := r.Claim
		if who == "" && r.Pod != "" {
			who = "pod " + r.Pod
		}
		names = append(names, inFull(r.Volume, who))
	}
	more := ""
	if n := len(all) - len(names); n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("volumes %s%s: %s", strings.Join(names, ", "), more, last.Tell(now))
}
