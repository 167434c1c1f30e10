package report

import (
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
)

// Node is the report of a whole node: what `csi-node status` prints. The JSON is
// the contract of `csi-node status --output json`.
type Node struct {
	Running bool     `json:"running"` // a plugin answered; else store and kernel were looked at
	Driver  string   `json:"driver,omitempty"`
	Version string   `json:"version,omitempty"`
	Volumes []Status `json:"volumes"`
	// Refusals are the last refused calls of volumes, by their ids: also of volumes of
	// which nothing is asked, because the call was refused.
	Refusals []Refusal `json:"refusals,omitempty"`
	// Registration is what kubelet answered, if the plugin registers itself.
	Registration *Registration `json:"registration,omitempty"`
}

// Registration is the last answer of kubelet to a plugin that registers itself.
type Registration struct {
	Socket     string    `json:"socket"` // at which kubelet asks
	Registered bool      `json:"registered"`
	Error      string    `json:"error,omitempty"` // why kubelet refused, or cannot be reached
	Since      time.Time `json:"since,omitzero"`  // of the answer; zero: kubelet has not asked yet
}

// Unsettled gives the condition of each part that is not as asked, and why.
func (n Node) Unsettled() []string {
	var all []string
	for _, v := range n.Volumes {
		for _, p := range v.Parts {
			if p.Is != Settled {
				all = append(all, strings.TrimSuffix(fmt.Sprintf("%s is %s: %s", p.Part, p.Is, p.Error), ": "))
			}
		}
	}
	return all
}

// Print writes the report as a table.
func (n Node) Print(out io.Writer) error {
	if !n.Running {
		fmt.Fprintln(out, "No plugin is running. This is what the store asks for and what is on the node; nothing is done about it until one is started.")
	}
	if r := n.Registration; r != nil {
		fmt.Fprintln(out, r.tell())
	}
	if len(n.Volumes) == 0 {
		fmt.Fprintln(out, "No volume is asked of this node.")
		return n.printRefusals(out)
	}
	t := tabwriter.NewWriter(out, 0, 8, 2, ' ', 0)
	fmt.Fprintln(t, "VOLUME\tPART\tASKED\tIS\tSINCE\tNEXT TRY\tDETAIL")
	for _, v := range n.Volumes {
		fmt.Fprintf(t, "%s\t\t\t%s\t\t\t%s\n", v.Volume, v.Worst(), v.detail())
		for _, p := range v.Parts {
			next := ""
			if p.NextTry != nil {
				next = "in " + max(time.Until(*p.NextTry), 0).Round(time.Second/10).String()
			}
			part := p.Part
			if p.Pod != "" {
				part = "target of pod " + p.Pod
			}
			fmt.Fprintf(t, "\t%s\t%s\t%s\t%s ago\t%s\t%s\n", part, strings.Replace(p.Asked, " at "+p.Path, "", 1), p.Is, time.Since(p.Since).Round(time.Second), next, p.detail())
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	return n.printRefusals(out)
}

// printRefusals writes the calls that were refused not long ago.
func (n Node) printRefusals(out io.Writer) error {
	var text strings.Builder
	for i, r := range n.Refusals {
		if i == 0 {
			text.WriteString("\nCalls that were refused, the last one of each volume:\n")
		}
		fmt.Fprintf(&text, "  volume %s: %s\n", r.Volume, r.Tell(time.Now()))
	}
	_, err := io.WriteString(out, text.String())
	return err
}

func (r Registration) tell() string {
	switch {
	case r.Registered:
		return fmt.Sprintf("Registered with kubelet %s ago.", time.Since(r.Since).Round(time.Second))
	case r.Error != "":
		return fmt.Sprintf("The plugin is not registered with kubelet, as of %s ago: %s", time.Since(r.Since).Round(time.Second), r.Error)
	}
	return fmt.Sprintf("kubelet has not asked at %s yet: is it running, and is this its plugins_registry?", r.Socket)
}

// detail describes the volume as a whole: its device, and the step that runs.
func (s Status) detail() string {
	text := "device " + s.Device
	if s.Holder != "" {
		text += "; held by " + s.Holder
	}
	if s.Step != nil {
		text += fmt.Sprintf("; step %s has been running for %s", s.Step.Step, s.Step.Age.Round(time.Millisecond))
		if s.Step.Progress != "" {
			text += " (" + s.Step.Progress + ")"
		}
	}
	return text
}

// detail says what is wrong with a part, in one line, and how often it was lost.
func (p PartStatus) detail() string {
	words := strings.Fields(p.Error)
	if p.Losses > 0 {
		words = append(words, fmt.Sprintf("(lost %d times in a row, last %s ago)", p.Losses, time.Since(p.Lost).Round(time.Second)))
	}
	return strings.Join(words, " ")
}

// Print writes the explanation.
func (s Explanation) Print(out io.Writer) error {
	var text strings.Builder
	fmt.Fprintf(&text, "volume %s\n", s.Volume)
	for _, part := range []struct {
		title     string
		sentences []string
	}{
		{"Asked", s.Asked}, {"Is", s.Is}, {"Missing", s.Missing}, {"In the way", s.InTheWay}, {"Refused last", s.Refused}, {"Next", s.Next}, {"You can", s.YouCan},
	} {
		if len(part.sentences) == 0 {
			continue
		}
		fmt.Fprintf(&text, "\n%s:\n", part.title)
		for _, sentence := range part.sentences {
			fmt.Fprintf(&text, "  %s\n", sentence)
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}
