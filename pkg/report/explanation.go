package report

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Explanation is the report of a volume in sentences. The JSON is the contract of
// `csi-node explain --output json`; the sentences are not.
type Explanation struct {
	Volume   string   `json:"volume"`
	Asked    []string `json:"asked"`    // what was asked, and when
	Is       []string `json:"is"`       // what is there
	Missing  []string `json:"missing"`  // of what was asked
	Next     []string `json:"next"`     // what is being done, and what comes then
	InTheWay []string `json:"inTheWay"` // why it is not done
	Refused  []string `json:"refused"`  // the last call that was refused; nothing if there is none
	YouCan   []string `json:"youCan"`   // what a person can do
}

// Explanation renders the report as sentences.
func (v Volume) Explanation() Explanation {
	explanation := Explanation{Volume: v.ID, Asked: v.askedSentences(), Is: v.actualSentences(), Next: v.nextSentences()}
	if v.LookErr != nil {
		explanation.InTheWay = append(explanation.InTheWay, sentence("the volume cannot be looked at now, so this is what was seen last: %v", v.LookErr))
	}
	for _, p := range v.Parts {
		if p.Is == Settled {
			if p.Losses > 0 {
				explanation.Is = append(explanation.Is, sentence("%s was lost, not by the plugin's doing, %s, and is there again", p.Part, ago(p.Lost, v.Made)))
			}
			continue
		}
		explanation.Missing = append(explanation.Missing, sentence("%s: it should be %s, and is %s", p.Part, p.Asked, p.Is))
		explanation.InTheWay = append(explanation.InTheWay, v.obstacleSentences(p)...)
	}
	for _, next := range v.Next {
		if next.Failure != nil {
			explanation.InTheWay = append(explanation.InTheWay, sentence("%s: %v", next.Step, next.Failure))
		}
	}
	if v.Refusal != nil {
		explanation.Refused = []string{sentence("%s", v.Refusal.Tell(v.Made))}
	}
	explanation.YouCan = v.helpSentences(explanation)
	if v.Unattended {
		explanation.InTheWay = append([]string{"No plugin runs on this node."}, explanation.InTheWay...)
		explanation.YouCan = []string{"Start the plugin: it takes up what is missing."}
		if len(explanation.Missing) == 0 {
			explanation.YouCan = []string{"Start the plugin: without it, no pod with the volume starts or ends."}
		}
	}
	return explanation
}

// Section is a part of an explanation.
type Section struct {
	Title     string   `json:"title"`
	Sentences []string `json:"sentences"`
}

// Sections returns the explanation in the order in which people read it, without what is
// empty.
func (e Explanation) Sections() []Section {
	return slices.DeleteFunc([]Section{
		{"Asked", e.Asked}, {"Is", e.Is}, {"Missing", e.Missing}, {"In the way", e.InTheWay}, {"Refused last", e.Refused}, {"Next", e.Next}, {"You can", e.YouCan},
	}, func(section Section) bool { return len(section.Sentences) == 0 })
}

// Print writes the explanation.
func (e Explanation) Print(out io.Writer) error {
	var text strings.Builder
	fmt.Fprintf(&text, "volume %s\n", e.Volume)
	for _, section := range e.Sections() {
		fmt.Fprintf(&text, "\n%s:\n", section.Title)
		for _, sentence := range section.Sentences {
			fmt.Fprintf(&text, "  %s\n", sentence)
		}
	}
	_, err := io.WriteString(out, text.String())
	return err
}

// sentence makes a sentence of a phrase: it begins with a capital, unless with a path,
// and ends with a full stop.
func sentence(format string, args ...any) string {
	text := strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " ")
	if text != "" && text[0] >= 'a' && text[0] <= 'z' {
		text = strings.ToUpper(text[:1]) + text[1:]
	}
	return strings.TrimSuffix(text, ".") + "."
}

func ago(since, now time.Time) string {
	return now.Sub(since).Round(time.Second).String() + " ago"
}

func (v Volume) askedSentences() []string {
	if len(v.Parts) == 0 {
		return []string{"Nothing is asked of it on this node."}
	}
	var all []string
	if s := v.Want.Stage; s != nil {
		all = append(all, stageSentence(s, v.Made))
	}
	if s := v.Want.Size; s != nil {
		all = append(all, sentence("NodeExpandVolume asked %s that it has %s", ago(s.Since, v.Made), askedOfSize(s)))
	}
	for _, path := range v.Want.TargetPaths() {
		all = append(all, targetSentence(path, v.Want.Targets[path], v.Made))
	}
	return all
}

func stageSentence(s *state.Stage, now time.Time) string {
	when := ago(s.Since, now)
	switch {
	case s.Withdrawn:
		return sentence("staging it at %s failed for good %s, and what was begun is taken back", s.Path, when)
	case s.Inline != nil:
		return inlineSentence(s, when)
	case s.Gone:
		return sentence("NodeUnstageVolume asked %s that it is not staged at %s", when, s.Path)
	case s.Provisional:
		return sentence("no request to stage it is known; since %s something is asked that needs it to be %s", when, askedStage(s))
	case s.Adopted:
		return sentence("%s it was found staged at %s as %s, without an intent, and taken over", when, s.Path, s.Capability)
	}
	return sentence("NodeStageVolume asked %s that it is staged at %s as %s, %s", when, s.Path, s.Capability, state.FormatAccess(s.ReadOnly))
}

// inlineSentence is stageSentence for an inline volume: NodePublishVolume asks for its
// stage, too, and nobody calls NodeStageVolume.
func inlineSentence(s *state.Stage, when string) string {
	switch {
	case s.Gone && s.Inline.Ended:
		return sentence("%s its publish ended, and it is to be unstaged from %s and deleted", when, s.Path)
	case s.Gone:
		return sentence("it is an inline volume; %s it was asked that it is not staged at %s", when, s.Path)
	case s.Adopted:
		return sentence("it is an inline volume; %s it was found staged at %s as %s, without an intent, and taken over", when, s.Path, s.Capability)
	}
	return sentence("it is an inline volume, which %s was asked for with its publish, to be staged at %s as %s", when, s.Path, s.Capability)
}

func targetSentence(path string, t *state.Target, now time.Time) string {
	when := ago(t.Since, now)
	if pod := t.Pod(); pod != "" {
		path += " for pod " + pod
	}
	switch {
	case t.Withdrawn && t.Capability.Access == "":
		return sentence("NodeUnstageVolume asked %s that it is not mounted at %s, where it is not known to be staged", when, path)
	case t.Withdrawn:
		return sentence("publishing it at %s failed for good %s, and what was begun is taken back", path, when)
	case t.Gone:
		return sentence("NodeUnpublishVolume, or the end of the pod, asked %s that it is not published at %s", when, path)
	}
	return sentence("NodePublishVolume asked %s that it is published at %s, %s", when, path, state.FormatAccess(t.ReadOnly))
}

func (v Volume) actualSentences() []string {
	have := v.Have
	all := []string{dataSentence(have)}
	if have.Source == nil {
		for _, e := range have.Stack() {
			all = append(all, elementSentence(e))
		}
	}
	if view := have.View; view.Present() {
		all = append(all, sentence("%s (%s) is a read-only view of it", view.Path, view.Number))
	}
	if c := have.Contents; c.Err != nil {
		all = append(all, sentence("what is on it cannot be read: %v", c.Err))
	} else if c.Kind != state.ContentsUnread {
		found := c.Found
		if c.UUID != "" {
			found += ", UUID " + c.UUID
		}
		all = append(all, sentence("it holds: %s", found))
	}
	if s := v.Want.Stage; s != nil && s.Path != "" {
		all = append(all, placeSentence(s.Path, have.Stage))
	}
	for path, m := range have.Targets.All() {
		all = append(all, placeSentence(path, m))
	}
	return all
}

// dataSentence says what the volume's data is, as its backend knows it.
func dataSentence(have state.Actual) string {
	d := have.Lowest()
	switch {
	case d.Missing:
		return "There is no such volume on this node, or its data is gone."
	case have.Source != nil:
		return sentence("it is mounted from %s (%s), at each target by itself", have.Source.Source, have.Source.FSType)
	case d.Err != nil || d.State == state.DeviceUnknown && d.Capacity == 0, away(d):
		return "What its data is, and whether it was ever formatted, is not known now."
	}
	format := "never formatted"
	switch {
	case d.Formatting:
		format = "with a format that was begun and has not ended"
	case d.Formatted != "":
		format = "formatted as " + d.Formatted
	}
	if d.Raw {
		format += ", and published as a raw block device before"
	}
	size := state.FormatSize(cmp.Or(d.Capacity, d.Size)) // not every backend knows what it promised
	if d.Lacks > 0 {
		size += ", of which the last " + state.FormatSize(d.Lacks) + " are lost"
	}
	return sentence("its data is %s: %s, %s", cmp.Or(d.Backing, d.Path), size, format)
}

// away reports whether nothing is known of a device, as when its storage is not on this node.
func away(d state.Device) bool {
	return d.State == state.DeviceAbsent && d.Backing == "" && d.Path == "" && d.Size == 0 && d.Capacity == 0 && d.Formatted == "" && !d.Formatting
}

// elementSentence describes one device of the volume's stack.
func elementSentence(e state.Element) string {
	d, it := e.Device, "it"
	if e.Layer != "" {
		it = "its layer " + e.Layer
	}
	switch {
	case d.Stray:
		return sentence("%s (%s) is on a device that is not the volume's any more", it, d.Path)
	case d.State == state.DeviceUnknown:
		return sentence("whether %s is attached is not known", it)
	case d.State == state.DeviceAbsent && d.Unmade:
		return sentence("%s is not made yet", it)
	case d.State == state.DeviceAbsent:
		return sentence("%s is not attached", it)
	case d.State == state.DeviceForeign && e.Layer == "":
		return sentence("its data is used by %s, which the plugin did not attach", d.Holder)
	case d.State == state.DeviceForeign:
		return sentence("%s is used by %s, which the plugin did not open", it, d.Holder)
	}
	return sentence("%s (%s) is %s and shows %s %s, with %s", d.Path, d.Number, d.State, it, state.FormatAccess(d.ReadOnly), state.FormatSize(d.Size))
}

func placeSentence(path string, m state.Mountpoint) string {
	if m.Err != nil {
		return sentence("%s cannot be looked at: %v", path, m.Err)
	}
	if m.File == state.UnknownFile && len(m.Mounts) == 0 {
		return sentence("what is at %s is not known", path)
	}
	if len(m.Mounts) == 0 {
		return sentence("at %s is %s, and nothing is mounted there", path, m.File)
	}
	var words []string
	for _, one := range m.Mounts {
		text := DescribeMount(one)
		if flags := one.Attributes.String(); flags != "" && !one.Node {
			text += " with " + flags
		}
		if one.SuperReadOnly {
			text += ", read-only as a whole"
		}
		if one.Corrupt {
			text += ", broken"
		}
		words = append(words, text)
	}
	return sentence("at %s is mounted: %s", path, strings.Join(words, "; beneath it "))
}

// DescribeMount says what a mount is of, such as "/dev/sdb1 (xfs on 8:17, root /)".
func DescribeMount(m state.Mount) string {
	switch {
	case m.Node:
		return fmt.Sprintf("the block device %s", m.Device)
	case m.Device != state.DeviceNumber{}:
		return fmt.Sprintf("%s (%s on %s, root %s)", m.Source, m.FSType, m.Device, m.Root)
	}
	return fmt.Sprintf("%s (%s)", m.Source, m.FSType)
}

// obstacleSentences says why a part is not as it should be.
func (v Volume) obstacleSentences(p Part) []string {
	var all []string
	told := "" // of the whole volume
	if v.LookErr != nil {
		told = v.ownWords(v.LookErr.Error())
	}
	why, problem := strings.TrimPrefix(v.ownWords(p.Why()), p.Part.String()+": "), v.ownWords(p.Problem)
	if why != "" && why != told {
		all = append(all, sentence("%s: %s", p.Part, why))
	}
	if problem != "" && problem != told && !strings.Contains(why, problem) {
		all = append(all, sentence("%s: %s", p.Part, problem))
	}
	for _, need := range p.Needs {
		all = append(all, sentence("%s waits for %s", p.Part, need))
	}
	if p.Losses > 0 {
		often := ""
		if p.Losses > 1 {
			often = ", and " + timesInARow(p.Losses)
		}
		all = append(all, sentence("%s was lost, not by the plugin's doing, %s%s", p.Part, ago(p.Lost, v.Made), often))
	}
	return all
}

// ownWords returns an error without the volume that it begins with.
func (v Volume) ownWords(text string) string { return strings.TrimPrefix(text, "volume "+v.ID+": ") }

// nextSentences says what runs and what comes then.
func (v Volume) nextSentences() []string {
	var all []string
	if v.Running != nil {
		all = append(all, sentence("%s", v.Running.Tell(v.Made, time.Second)))
	}
	for _, next := range v.Next {
		when := ""
		if wait := next.At.Sub(v.Made); wait > 0 {
			when = ", in " + wait.Round(time.Second).String()
		}
		all = append(all, sentence("%s%s", next.Step, when))
	}
	return all
}

// longStep is when a step has taken so long that somebody should look.
const longStep = 30 * time.Second

// helpSentences says what a person can do.
func (v Volume) helpSentences(explanation Explanation) []string {
	var all []string
	if len(v.Parts) == 0 && v.holds() {
		all = append(all, "If pods use it, restart kubelet, which asks for it again: `csi-node orphans` tells where it is mounted. `csi-node orphans --clean` detaches the device, unless somebody uses it.")
	}
	if r := v.Running; r != nil && v.Made.Sub(r.Since) > longStep && r.Progress == "" {
		all = append(all, "Look into the kernel's log (dmesg) for errors of the disk: a step that waits for a dead disk ends only when the disk answers. Other volumes are not held up.")
	}
	if d := v.Have.Lowest(); d.Missing && d.Attached() {
		all = append(all, sentence("save the data before the last of the pods ends: until then %s has all of it, though its file is gone. Copy their files from within the pods, or read the device while nothing writes", d.Path))
	}
	if len(explanation.InTheWay) > 0 && v.Running == nil {
		all = append(all, sentence("mend what is in the way; `csi-node volume retry %s` then tries at once", v.ID))
	}
	if len(v.Parts) == 0 && v.Refusal != nil {
		return append(all, "Put right what the refusal names: whoever made the call makes it again.")
	}
	if len(all) == 0 && len(explanation.Missing) == 0 {
		all = append(all, "Nothing is left to do.")
		if len(v.Parts) == 0 {
			all = append(all, "If a pod waits for it, `kubectl describe pod` tells why its calls are refused.")
		} else if v.Refusal != nil {
			all = append(all, "If a pod still waits for the call that was refused, put right what the refusal names: whoever made the call makes it again.")
		}
	}
	return all
}
