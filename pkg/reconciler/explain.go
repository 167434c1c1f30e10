package reconciler

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// Story tells of one volume in sentences, for people. The JSON is the contract
// of `csi-node explain --output json`; the sentences are not.
type Story struct {
	Volume   string   `json:"volume"`
	Asked    []string `json:"asked"`    // what was asked, and when
	Is       []string `json:"is"`       // what is there
	Missing  []string `json:"missing"`  // of what was asked
	Next     []string `json:"next"`     // what is being done, and what comes then
	InTheWay []string `json:"inTheWay"` // why it is not done
	YouCan   []string `json:"youCan"`   // what a person can do
}

// explainTime bounds the look that Explain makes.
const explainTime = 3 * time.Second

// Explain looks at a volume and tells its story. It acts on nothing. When the
// look does not end in time, it tells what was seen last. NotFound: nothing is
// asked of the volume, and there is no such volume.
func (r *Reconciler) Explain(ctx context.Context, id string) (Story, error) {
	want := r.store.Get(id)
	if want == nil {
		want = &state.Volume{ID: id}
	}
	ctx, cancel := context.WithTimeout(ctx, explainTime)
	defer cancel()
	have, err := r.Observe(ctx, want)
	if want.Empty() && err != nil {
		return Story{}, err
	}
	if want.Empty() && have.Device.Missing && !slices.ContainsFunc(have.Stack(), func(e state.Element) bool { return standsOrStrays(e.Device) }) {
		return Story{}, state.Errorf(state.NotFound, "volume %s: nothing is asked of it on this node, and there is no such volume", id)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volumes[id]
	if v == nil {
		v = &volume{want: want}
	}
	// Who holds what only the worker may ask.
	have.Keepers = v.have.Keepers
	for _, d := range devicesOf(&have) {
		for _, was := range devicesOf(&v.have) {
			if was.Number == d.Number && stands(*d) {
				d.Held, d.Holder = was.Held, cmp.Or(d.Holder, was.Holder)
			}
		}
	}
	plan := MakePlan(want, have)
	now := time.Now()
	story := Story{Volume: id, Asked: tellAsked(want, now)}
	if err != nil {
		plan, have = v.plan, v.have
		story.InTheWay = append(story.InTheWay, inWords("the volume cannot be looked at now, so this is what was seen last: %v", err))
	}
	// What holds now was seen just now; the rest the worker knows better.
	status := r.status(want)
	var restored []string
	for i, part := range want.Parts() {
		p := status.Parts[i]
		if plan.Verdicts[part].Settled && !want.Intent(part).Gone {
			if lost := v.repairs[part]; lost != nil && lost.losses > 0 {
				restored = append(restored, inWords("%s was lost, not by the plugin's doing, %s, and is there again", part, ago(lost.met, now)))
			}
			continue
		}
		if p.Is == Settled { // as the worker saw it last
			p.Is = UnderWay
			if plan.Verdicts[part].Problem != (Problem{}) {
				p.Is = Failing
			}
		}
		story.Missing = append(story.Missing, inWords("%s: it should be %s, and is %s", p.Part, p.Asked, p.Is))
		story.InTheWay = append(story.InTheWay, v.tellObstacle(part, p, plan, now)...)
	}
	story.Is = append(tellActual(want, have), restored...)
	story.Next = v.tellNext(plan, now)
	story.YouCan = v.tellHelp(want, have, story, now)
	return story, nil
}

// inWords makes a sentence of a phrase: it begins with a capital, unless with a path,
// and ends with a full stop.
func inWords(format string, args ...any) string {
	text := strings.Join(strings.Fields(fmt.Sprintf(format, args...)), " ")
	if text != "" && text[0] >= 'a' && text[0] <= 'z' {
		text = strings.ToUpper(text[:1]) + text[1:]
	}
	return strings.TrimSuffix(text, ".") + "."
}

func ago(since, now time.Time) string {
	return now.Sub(since).Round(time.Second).String() + " ago"
}

func tellAsked(want *state.Volume, now time.Time) []string {
	if len(want.Parts()) == 0 {
		return []string{"Nothing is asked of it on this node."}
	}
	var all []string
	if s := want.Stage; s != nil {
		when := ago(s.Since, now)
		switch {
		case s.Withdrawn:
			all = append(all, inWords("staging it at %s failed for good %s, and what was begun is taken back", s.Path, when))
		case s.Gone && s.Inline != nil && s.Inline.Ended:
			all = append(all, inWords("%s its publish ended, and it is to be unstaged from %s and deleted", when, s.Path))
		case s.Gone:
			all = append(all, inWords("NodeUnstageVolume asked %s that it is not staged at %s", when, s.Path))
		case s.Provisional:
			all = append(all, inWords("no request to stage it is known; since %s something is asked that needs it to be %s", when, askedStage(s)))
		case s.Adopted:
			all = append(all, inWords("%s it was found staged at %s as %s, without an intent, and taken over", when, s.Path, s.Capability))
		case s.Inline != nil:
			all = append(all, inWords("it is an inline volume, which %s was asked for with its publish, to be staged at %s as %s", when, s.Path, s.Capability))
		default:
			all = append(all, inWords("NodeStageVolume asked %s that it is staged at %s as %s, %s", when, s.Path, s.Capability, access(s.ReadOnly)))
		}
	}
	if s := want.Size; s != nil {
		all = append(all, inWords("NodeExpandVolume asked %s that it has %d bytes", ago(s.Since, now), s.Bytes))
	}
	for _, path := range want.TargetPaths() {
		t := want.Targets[path]
		when := ago(t.Since, now)
		if pod := t.Pod(); pod != "" {
			path += " for pod " + pod
		}
		switch {
		case t.Withdrawn:
			all = append(all, inWords("publishing it at %s failed for good %s, and what was begun is taken back", path, when))
		case t.Gone:
			all = append(all, inWords("NodeUnpublishVolume, or the end of the pod, asked %s that it is not published at %s", when, path))
		default:
			all = append(all, inWords("NodePublishVolume asked %s that it is published at %s, %s", when, path, access(t.ReadOnly)))
		}
	}
	return all
}

func tellActual(want *state.Volume, have state.Actual) []string {
	var all []string
	switch d := have.Stack()[0].Device; {
	case d.Missing:
		all = append(all, "There is no such volume on this node, or its data is gone.")
	case have.Source != nil:
		all = append(all, inWords("it is mounted from %s (%s), at each target by itself", have.Source.Source, have.Source.FSType))
	case d.Err != nil || d.State == state.DeviceUnknown && d.Capacity == 0:
		all = append(all, "What its data is, and whether it was ever formatted, is not known now.")
	default:
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
		all = append(all, inWords("its data is %s: %d bytes, %s", cmp.Or(d.Backing, d.Path), d.Capacity, format))
	}
	if have.Source == nil {
		for _, e := range have.Stack() {
			all = append(all, tellElement(e))
		}
	}
	if v := have.View; stands(v) {
		all = append(all, inWords("%s (%s) is a read-only view of it", v.Path, v.Number))
	}
	if c := have.Contents; c.Err != nil {
		all = append(all, inWords("what is on it cannot be read: %v", c.Err))
	} else if c.Kind != state.ContentsUnread {
		found := c.Found
		if c.UUID != "" {
			found += ", UUID " + c.UUID
		}
		all = append(all, inWords("it holds: %s", found))
	}
	if want.Stage != nil && want.Stage.Path != "" {
		all = append(all, tellPlace(want.Stage.Path, have.Stage))
	}
	for _, path := range slices.Sorted(maps.Keys(have.Targets)) {
		all = append(all, tellPlace(path, have.Targets[path]))
	}
	return all
}

// tellElement says what stands of one device of the volume's stack.
func tellElement(e state.Element) string {
	d, it := e.Device, "it"
	if e.Layer != "" {
		it = "its layer " + e.Layer
	}
	switch {
	case d.Stray:
		return inWords("%s (%s) is on a device that is not the volume's any more", it, d.Path)
	case d.State == state.DeviceUnknown:
		return inWords("whether %s is attached is not known", it)
	case d.State == state.DeviceAbsent && d.Unmade:
		return inWords("%s is not made yet", it)
	case d.State == state.DeviceAbsent:
		return inWords("%s is not attached", it)
	case d.State == state.DeviceForeign && e.Layer == "":
		return inWords("its data is used by %s, which the plugin did not attach", d.Holder)
	case d.State == state.DeviceForeign:
		return inWords("%s is used by %s, which the plugin did not open", it, d.Holder)
	}
	return inWords("%s (%s) is %s and shows %s %s, with %d bytes", d.Path, d.Number, d.State, it, access(d.ReadOnly), d.Size)
}

func tellPlace(path string, m state.Mountpoint) string {
	if m.Err != nil {
		return inWords("%s cannot be looked at: %v", path, m.Err)
	}
	if m.File == state.UnknownFile && len(m.Mounts) == 0 {
		return inWords("what is at %s is not known", path)
	}
	if len(m.Mounts) == 0 {
		return inWords("at %s is %s, and nothing is mounted there", path, m.File)
	}
	var words []string
	for _, one := range m.Mounts {
		text := describe(one)
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
	return inWords("at %s is mounted: %s", path, strings.Join(words, "; beneath it "))
}

// tellObstacle says why a part is not as it should be.
func (v *volume) tellObstacle(part state.Part, p PartStatus, plan Plan, now time.Time) []string {
	var all []string
	problem := plan.Verdicts[part].Problem.Text
	if text := strings.TrimPrefix(p.Error, "volume "+v.want.ID+": "); text != "" {
		all = append(all, inWords("%s: %s", part, strings.TrimPrefix(text, part.String()+": ")))
	}
	if problem != "" && !strings.Contains(p.Error, problem) {
		all = append(all, inWords("%s: %s", part, problem))
	}
	for _, need := range plan.Verdicts[part].Needs {
		all = append(all, inWords("%s waits for %s", part, need))
	}
	if lost := v.repairs[part]; lost != nil && lost.losses > 0 {
		all = append(all, inWords("%s was lost, not by the plugin's doing, %s, and %d times in a row", part, ago(lost.met, now), lost.losses))
	}
	return all
}

// tellNext says what runs and what comes then.
func (v *volume) tellNext(plan Plan, now time.Time) []string {
	var all []string
	if !v.since.IsZero() {
		all = append(all, inWords("%s", v.tellRunning(now, time.Second)))
	}
	for _, step := range plan.Steps {
		lost := v.repairs[step.Part]
		if !v.since.IsZero() && step == v.running || lost != nil && lost.state == left {
			continue
		}
		when := ""
		next := time.Time{}
		if a := v.attempts[step.Part]; a != nil {
			next = a.next
		}
		if lost != nil && lost.state == putOff && lost.next.After(next) {
			next = lost.next
		}
		if wait := next.Sub(now); wait > 0 {
			when = ", in " + wait.Round(time.Second).String()
		}
		all = append(all, inWords("%s%s", step, when))
	}
	return all
}

// longStep is when a step has taken so long that somebody should look.
const longStep = 30 * time.Second

// tellHelp says what a person can do.
func (v *volume) tellHelp(want *state.Volume, have state.Actual, story Story, now time.Time) []string {
	var all []string
	if len(want.Parts()) == 0 && slices.ContainsFunc(have.Stack(), func(e state.Element) bool { return standsOrStrays(e.Device) }) {
		all = append(all, "`csi-node orphans --clean` detaches the device, unless somebody uses it.")
	}
	if !v.since.IsZero() && now.Sub(v.since) > longStep && v.progress == "" {
		all = append(all, "Look into the kernel's log (dmesg) for errors of the disk: a step that waits for a dead disk ends only when the disk answers. Other volumes are not held up.")
	}
	if len(story.InTheWay) > 0 && v.since.IsZero() {
		all = append(all, inWords("mend what is in the way; `csi-node volume retry %s` then tries at once", want.ID))
	}
	if len(all) == 0 && len(story.Missing) == 0 {
		all = append(all, "Nothing is left to do.")
		if len(want.Parts()) == 0 {
			all = append(all, "If a pod waits for it, `kubectl describe pod` tells why its calls are refused.")
		}
	}
	return all
}
