package reconciler_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// TestPlan shows by example what TestPlanForEveryState, which holds the rules,
// has no worlds for: the steps in order, then how each part stands, with words
// from its problem.
func TestPlan(t *testing.T) {
	for _, tt := range []struct {
		name string
		want *state.Volume
		have state.Actual
		plan []string
	}{
		{"type left open: not while facts cannot be read", volume(staged(as(""))), actual(device(state.DeviceAbsent, unread)),
			[]string{"stage: stuck, Unavailable: the pool is away"}},
		{"who uses a backing is named", volume(staged()), actual(device(state.DeviceForeign, heldBy("/dev/loop9"))),
			[]string{"stage: stuck, FailedPrecondition: used by /dev/loop9"}},
		{"what was found is told", volume(staged()), actual(attached(), contents(state.Contents{Kind: state.ContentsOther, Found: "LUKS header at byte 0"})),
			[]string{"stage: stuck, FailedPrecondition: found LUKS header at byte 0"}},
		{"type left open: chosen first", volume(staged(as(""))), actual(stageIs(fullDir())),
			[]string{"choose for stage", "stage: under way"}},
		{"type left open: of no volume", volume(staged(as(""))), actual(device(state.DeviceAbsent, missing)),
			[]string{"stage: stuck, NotFound: no such volume"}},
		{"type left open: of no account in the end", volume(stageOf(asBlock, []how{as(""), gone})), actual(attached()),
			[]string{"detach for stage", "stage: under way"}},
		{"unknown: the words are those of the cause", volume(unstaged()), actual(device(state.DeviceUnknown, unread)),
			[]string{"stage: stuck, Unavailable: the pool is away"}},
		{"source: another one", volume(staged(as("")), published(podA)), actual(mountSource, targetIs(podA, fromSource(func(m *state.Mount) { m.Source = "server:/other" }))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: it is not this volume's"}},
		{"source: a part of it", volume(staged(as("")), published(podA)), actual(mountSource, targetIs(podA, fromSource(part("/sub")))),
			[]string{"stage: settled", "A: stuck, FailedPrecondition: it is not this volume's"}},
		{"shared: a layer is not opened unasked", volume(staged(stageAccepted)), actual(attached(shared, madeLayer), layer(absent), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: only when somebody asks"}},
		{"shared: one mount too many goes", volume(staged(stageAccepted)), actual(attached(shared), ext4(), stageIs(over(mounted(rw), mounted(rw)))),
			[]string{"unmount for stage", "stage: under way"}},
		{"identity: a disk that has gone is known by the number that it had", volume(stageOf(asFilesystem, []how{known("a"), gone})), actual(device(state.DeviceAbsent, numbered), stageIs(mounted(rw))),
			[]string{"unmount for stage", "stage: under way"}},
		{"growth: the volume will be larger than the limit", volume(staged(), size(50), limit(150)), actual(attached(sized(100, 200)), ext4(), stageIs(mounted(rw))),
			[]string{"grow-device for stage", "stage: under way", "size: stuck, OutOfRange: never shrinks"}},
		{"growth: there is enough, and no more is allowed", volume(staged(), size(50), limit(100)), actual(attached(), ext4(), stageIs(mounted(rw))),
			[]string{"stage: settled", "size: settled"}},
		{"target: flags of its own", volume(staged(), published(podA, flagged("noexec"))), actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw))),
			[]string{"set-attributes for A", "stage: settled", "A: under way"}},
		{"type left open: chosen by what is on a layer", volume(staged(as(""))), actual(attached(madeLayer), layer(), ext4()),
			[]string{"choose for stage", "stage: under way"}},
		{"type left open: not before that is seen", volume(staged(as(""))), actual(attached(madeLayer), layer(absent)),
			[]string{"open-layer L for stage", "stage: under way"}},
		{"secret: the device may need one, too", volume(staged()), actual(device(state.DeviceAbsent, keyless)),
			[]string{"stage: stuck, Unavailable: the volume waits for its secret"}},
		{"secret: then it is not detached to be attached otherwise", volume(staged(readOnly)), actual(attached(keyless)),
			[]string{"stage: stuck, Unavailable: the volume waits for its secret"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			told := tellPlan(tt.want, reconciler.MakePlan(tt.want, tt.have))
			if !slices.EqualFunc(told, tt.plan, matches) {
				t.Errorf("plan\n\t%s\nwant\n\t%s", strings.Join(told, "\n\t"), strings.Join(tt.plan, "\n\t"))
			}
		})
	}
}

// tellPlan puts a plan into lines.
func tellPlan(want *state.Volume, plan reconciler.Plan) []string {
	name := strings.NewReplacer("target "+podA, "A", "target "+podB, "B")
	var lines []string
	for _, step := range plan.Steps {
		lines = append(lines, name.Replace(step.String()))
	}
	parts := slices.DeleteFunc(want.Parts(), func(p state.Part) bool { return p.Kind == state.TargetKind })
	for _, path := range want.TargetPaths() {
		parts = append(parts, state.TargetPart(path))
	}
	for _, part := range parts {
		lines = append(lines, fmt.Sprintf("%s: %s", name.Replace(part.String()), name.Replace(tellVerdict(plan.Verdicts[part]))))
	}
	return lines
}

func tellVerdict(v reconciler.Verdict) string {
	told := "under way"
	switch {
	case v.Settled:
		told = "settled"
	case len(v.Needs) > 0:
		return fmt.Sprint("waits for ", strings.Trim(fmt.Sprint(v.Needs), "[]"))
	case v.Problem != reconciler.Problem{}:
		told = "stuck"
	}
	if v.Problem != (reconciler.Problem{}) {
		told += fmt.Sprintf(", %s: %s", v.Problem.Class, v.Problem.Text)
	}
	return told
}

// matches compares a line with the one wanted, whose text after a second colon
// need only be found in it.
func matches(line, want string) bool {
	if words := strings.SplitN(want, ": ", 3); len(words) == 3 {
		head := words[0] + ": " + words[1] + ": "
		return strings.HasPrefix(line, head) && strings.Contains(line[len(head):], words[2])
	}
	return line == want
}

// ---- Builders of desired states. ----

const (
	podA = "/pods/a/mount"
	podB = "/pods/b/mount"
)

type asker func(*state.Volume)

func volume(asked ...asker) *state.Volume {
	v := &state.Volume{ID: "vol", Targets: map[string]*state.Target{}}
	for _, ask := range asked {
		ask(v)
	}
	return v
}

// how is an option of a stage or a target; the other is nil.
type how func(s *state.Stage, t *state.Target)

func stageOf(c state.Capability, options []how) asker {
	return func(v *state.Volume) {
		v.Stage = &state.Stage{Path: "/staging", Capability: c}
		for _, option := range options {
			option(v.Stage, nil)
		}
	}
}

func targetOf(path string, c state.Capability, options []how) asker {
	return func(v *state.Volume) {
		t := &state.Target{Path: path, Capability: c}
		v.Targets[path] = t
		for _, option := range options {
			option(nil, t)
		}
	}
}

var (
	asFilesystem = state.Capability{Access: state.MountAccess, FSType: "ext4"}
	asBlock      = state.Capability{Access: state.BlockAccess}
)

func staged(options ...how) asker                 { return stageOf(asFilesystem, options) }
func unstaged() asker                             { return stageOf(asFilesystem, []how{gone}) }
func published(path string, options ...how) asker { return targetOf(path, asFilesystem, options) }
func unpublished(path string, options ...how) asker {
	return targetOf(path, asFilesystem, append(options, gone))
}
func size(bytes int64) asker { return func(v *state.Volume) { v.Size = &state.Size{Bytes: bytes} } }

// limit is the most that the size before it may come to.
func limit(bytes int64) asker { return func(v *state.Volume) { v.Size.Limit = bytes } }

func readOnly(s *state.Stage, t *state.Target) {
	if s != nil {
		s.ReadOnly = true
	} else {
		t.ReadOnly = true
	}
}

func gone(s *state.Stage, t *state.Target) {
	if s != nil {
		s.Gone = true
	} else {
		t.Gone = true
	}
}

func accepted(_ *state.Stage, t *state.Target) { t.Accepted = true }
func as(fsType string) how {
	return func(s *state.Stage, _ *state.Target) { s.Capability.FSType = fsType }
}

// ---- Builders of actual states. ----

var (
	disk = state.DeviceNumber{Major: 7, Minor: 1}
)

type fact func(*state.Actual)

// actual is what was looked at with nothing there, and then the facts.
func actual(facts ...fact) state.Actual {
	have := state.Actual{
		Device: state.Device{State: state.DeviceAbsent, Size: 100, Capacity: 100}, View: state.Device{State: state.DeviceAbsent},
		Stage: nothingThere(), Targets: map[string]state.Mountpoint{podA: nothingThere(), podB: nothingThere()},
	}
	for _, fact := range facts {
		fact(&have)
	}
	return have
}

type deviceFact func(*state.Device)

func device(s state.DeviceState, facts ...deviceFact) fact {
	return func(have *state.Actual) {
		d := &have.Device
		*d = state.Device{State: s, Size: 100, Capacity: 100}
		if s == state.DeviceAttached || s == state.DeviceDetaching {
			d.Path, d.Number = "/dev/loop1", disk
		}
		for _, fact := range facts {
			fact(d)
		}
	}
}

func attached(facts ...deviceFact) fact { return device(state.DeviceAttached, facts...) }

func missing(d *state.Device)         { d.Missing = true }
func unread(d *state.Device)          { d.Err = errors.New("the pool is away") }
func heldBy(holder string) deviceFact { return func(d *state.Device) { d.Holder = holder } }
func sized(bytes, capacity int64) deviceFact {
	return func(d *state.Device) { d.Size, d.Capacity = bytes, capacity }
}

type contentsFact func(*state.Contents)

func contents(c state.Contents, facts ...contentsFact) fact {
	for _, fact := range facts {
		fact(&c)
	}
	return func(have *state.Actual) { have.Contents = c }
}

func ext4(facts ...contentsFact) fact {
	return contents(state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4"}, facts...)
}
func growable(c *state.Contents) { c.Growable = true }

func stageIs(m state.Mountpoint) fact { return func(have *state.Actual) { have.Stage = m } }
func targetIs(path string, m state.Mountpoint) fact {
	return func(have *state.Actual) { have.Targets[path] = m }
}

func nothingThere() state.Mountpoint { return state.Mountpoint{File: state.NoFile} }
func emptyDir() state.Mountpoint     { return state.Mountpoint{File: state.Directory, Empty: true} }
func fullDir() state.Mountpoint      { return state.Mountpoint{File: state.Directory} }
func unseenNow() state.Mountpoint    { return state.Mountpoint{Err: errors.New("timed out")} }

type mountFact func(*state.Mount)

// mounted is the file system of the device.
func mounted(facts ...mountFact) state.Mountpoint {
	m := state.Mount{Device: disk, FSType: "ext4", Source: "/dev/loop1", Root: "/"}
	for _, fact := range facts {
		fact(&m)
	}
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}
}

func rw(m *state.Mount) { m.Attributes &^= state.ReadOnly }
func ro(m *state.Mount) { m.Attributes |= state.ReadOnly }

func foreign() state.Mountpoint {
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}}
}

// over stacks the mounts of one place on those of another.
func over(upper, lower state.Mountpoint) state.Mountpoint {
	upper.Mounts = append(upper.Mounts, lower.Mounts...)
	return upper
}

// ---- Facts of single rows. ----

func mountSource(have *state.Actual) {
	have.Source = &state.Source{FSType: "nfs4", Source: "server:/export"}
}

// fromSource is a mount of it.
func fromSource(facts ...mountFact) state.Mountpoint {
	m := state.Mount{FSType: "nfs4", Source: "server:/export", Root: "/"}
	for _, fact := range facts {
		fact(&m)
	}
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}
}

func shared(d *state.Device) { d.Shared = true }

func known(identity string) how {
	return func(s *state.Stage, _ *state.Target) { s.Identity = identity }
}
func numbered(d *state.Device) { d.Number = disk }

// A record of which nothing was looked at is planned nothing for.
func TestPlanWithoutALook(t *testing.T) {
	want := volume(staged(), size(100), published(podA), unpublished(podB))
	plan := reconciler.MakePlan(want, state.Actual{})
	if len(plan.Steps) > 0 {
		t.Errorf("steps %v", plan.Steps)
	}
	for part, v := range plan.Verdicts {
		if v.Settled {
			t.Errorf("%s is settled", part)
		}
	}
}

func TestProblems(t *testing.T) {
	plan := reconciler.MakePlan(volume(staged(), published(podB), published(podA), size(200)),
		actual(attached(sized(200, 200)), ext4(growable), stageIs(mounted(rw)), targetIs(podA, foreign()), targetIs(podB, unseenNow())))
	var parts []string
	for _, p := range plan.Problems() {
		if p.Text == "" {
			t.Errorf("%s has a problem without words", p.Part)
		}
		parts = append(parts, p.Part.String())
	}
	if want := []string{"size", "target " + podA, "target " + podB}; !slices.Equal(parts, want) {
		t.Errorf("problems of %q, want %q", parts, want)
	}
}

func stageAccepted(s *state.Stage, _ *state.Target) { s.Accepted = true }

func flagged(flags ...string) how {
	return func(_ *state.Stage, t *state.Target) { t.Capability.Flags = flags }
}

func part(root string) mountFact { return func(m *state.Mount) { m.Root = root } }

// mapped is the number of a layer's device.
var mapped = state.DeviceNumber{Major: 253, Minor: 1}

// layer puts the device of layer L on what was the device until now.
func layer(facts ...deviceFact) fact {
	return func(have *state.Actual) {
		source := have.Device
		have.Lower = []state.Element{{Device: source}}
		have.Layer = "L"
		d := &have.Device
		*d = state.Device{State: state.DeviceAttached, Path: "/dev/mapper/v", Number: mapped, Size: 99, Capacity: 99, ReadOnly: source.ReadOnly}
		for _, fact := range facts {
			fact(d)
		}
		// As the reconciler has it from the source.
		d.Missing, d.Formatting, d.Raw = source.Missing, d.Fresh, source.Raw && !d.Fresh
	}
}

func absent(d *state.Device) {
	d.State, d.Number, d.Path, d.Size = state.DeviceAbsent, state.DeviceNumber{}, "", 0
}
func stamped(d *state.Device)   { d.Fresh = true }
func madeLayer(d *state.Device) { d.Formatted = "L" }

func keyless(d *state.Device) { d.NeedsSecret = true }

func beneath(kind state.ContentsKind) fact {
	return func(have *state.Actual) { have.Beneath = state.Contents{Kind: kind, Found: "something"} }
}
