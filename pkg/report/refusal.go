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
func (r Refusal) Reason() string {
	return strings.TrimPrefix(strings.Join(strings.Fields(r.Error), " "), "volume "+r.Volume+": ")
}
