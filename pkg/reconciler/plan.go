package reconciler

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// Action is the name of a step. Names are part of the log, the metrics and the status.
type Action string

const (
	Look           Action = "look"            // the observation before each step, for no part
	Unbind         Action = "unbind"          // unmount the top mount at a target
	RemoveTarget   Action = "remove-target"   // delete the empty file or directory that was a target
	Unmount        Action = "unmount"         // unmount the top mount at the staging path
	Release        Action = "release"         // take copies of the stage out of other mount namespaces
	DetachView     Action = "detach-view"     // detach the read-only device over the device
	Detach         Action = "detach"          // detach the device
	AdoptInline    Action = "adopt-inline"    // write the lost record of an inline volume that is to be deleted
	RemoveStage    Action = "remove-stage"    // delete the empty staging directory of an inline volume
	DeleteVolume   Action = "delete-volume"   // delete an inline volume with its data
	LeaveVolume    Action = "leave-volume"    // leave the data of an inline volume whose owner is unknown to the sweep, which deletes it
	CreateVolume   Action = "create-volume"   // let the backend make an inline volume, or find it
	Adopt          Action = "adopt"           // write the lost record of a stage that is mounted
	Choose         Action = "choose"          // choose the file system of a stage that names none
	Attach         Action = "attach"          // attach the device, or reclaim one that is going away
	CreateLayer    Action = "create-layer"    // write a layer to a blank element
	OpenLayer      Action = "open-layer"      // make the device of a layer
	CloseLayer     Action = "close-layer"     // remove the device of a layer
	GrowLayer      Action = "grow-layer"      // let the device of a layer fill the element beneath
	GrowDevice     Action = "grow-device"     // grow the backing and the device
	BeginFormat    Action = "begin-format"    // prove the device blank; make the formatting mark durable, unless the device is Noted
	AbandonFormat  Action = "abandon-format"  // clear the formatting mark: the device holds something else
	Erase          Action = "erase"           // zero what an interrupted format left
	Format         Action = "format"          // mkfs, read back, clear the mark
	Check          Action = "check"           // fsck
	GrowFilesystem Action = "grow-filesystem" // grow the file system to its device
	Mount          Action = "mount"           // mount the file system at the staging path
	MountSource    Action = "mount-source"    // mount a source that is no device at a target
	SetAttributes  Action = "set-attributes"  // correct the flags of a mount
	AttachView     Action = "attach-view"     // attach a read-only device over the device, or grow it
	MarkRaw        Action = "mark-raw"        // durably note that the device is published raw, for writing
	Bind           Action = "bind"            // bind the stage, or the device node, at a target
)

// Step is one action for the sake of one part. It is comparable.
type Step struct {
	Action Action     `json:"action"`
	Part   state.Part `json:"part"`
	// Layer is the one that the step works on; empty for the device of the backend.
	Layer string `json:"layer,omitempty"`
}

func (s Step) String() string {
	if s.Action == Look {
		return string(s.Action)
	}
	text := string(s.Action)
	if s.Layer != "" {
		text += " " + s.Layer
	}
	return text + " for " + s.Part.String()
}

// Problem is why a part cannot be made as asked, in words for an operator. The zero
// value is no problem.
type Problem struct {
	Class state.Class
	Text  string
}

// Verdict is what a plan says of one part: settled, stuck on a problem, waiting
// for other parts, or (none of these) under way by a step of the plan. A removal
// that is settled with a problem left something behind that is not the volume's:
// the caller is told, and nothing more is done.
type Verdict struct {
	Settled bool
	Problem Problem
	Needs   []state.Part
}

// Plan is what MakePlan decides. Each step may run now, whether or not another fails.
type Plan struct {
	Steps    []Step
	Verdicts Verdicts // one for each part of the desired state
}

// Verdicts are those of the parts of a volume, sorted by kind and path. For the few parts that
// most volumes have, a map would need twice the memory.
type Verdicts []partVerdict

type partVerdict struct {
	part    state.Part
	verdict Verdict
}

// find returns where the verdict of a part is, or is to be.
func (all Verdicts) find(part state.Part) (at int, found bool) {
	return slices.BinarySearchFunc(all, part, func(one partVerdict, part state.Part) int {
		return cmp.Or(cmp.Compare(one.part.Kind, part.Kind), cmp.Compare(one.part.Path, part.Path))
	})
}

// Lookup returns the verdict of a part, if there is one.
func (all Verdicts) Lookup(part state.Part) (v Verdict, found bool) {
	at, found := all.find(part)
	if found {
		v = all[at].verdict
	}
	return v, found
}

// Of returns the verdict of a part; the zero one if there is none.
func (all Verdicts) Of(part state.Part) Verdict {
	v, _ := all.Lookup(part)
	return v
}

// All returns the parts with their verdicts, in order.
func (all Verdicts) All() iter.Seq2[state.Part, Verdict] {
	return func(yield func(state.Part, Verdict) bool) {
		for _, one := range all {
			if !yield(one.part, one.verdict) {
				return
			}
		}
	}
}

// MakePlan decides what to do so that have becomes want. It is pure: no I/O,
// no clock, no globals; the same input gives the same plan. The steps come in
// the order targets, stage, device for removals, then device, stage, targets for
// additions.
func MakePlan(want *state.Volume, have state.Actual) Plan { return makePlan(want, &have).plan }

func makePlan(want *state.Volume, have *state.Actual) planner {
	p := newPlanner(want, have)
	for _, path := range want.TargetPaths() {
		if t := want.Targets[path]; t.Gone {
			p.setVerdict(state.TargetPart(path), p.unpublish(t))
		}
	}
	p.dropIdleView()
	if s := want.Stage; s != nil {
		if s.Gone {
			p.setVerdict(state.StagePart(), p.end(s))
			p.awaitEnd(s)
		} else {
			p.setVerdict(state.StagePart(), p.stage(s))
		}
	}
	if want.Size != nil {
		p.setVerdict(state.SizePart(), p.size(want.Size))
	}
	p.growMounted()
	p.growView()
	for _, path := range want.TargetPaths() {
		if t := want.Targets[path]; !t.Gone {
			p.setVerdict(state.TargetPart(path), p.publish(t))
		}
	}
	return p
}

// settled reports whether every part is settled.
func (p Plan) settled() bool {
	for _, v := range p.Verdicts.All() {
		if !v.Settled {
			return false
		}
	}
	return true
}

type planner struct {
	want       *state.Volume
	have       *state.Actual
	stack      []state.Element // of have
	plan       Plan
	remounting bool // targets are unbound so that a broken file system can be mounted anew
	asks       bool // the plan depends on the owner of an inline volume
}

// newPlanner returns a planner for which whatever was not observed is unknown, as if
// its observation had failed.
func newPlanner(want *state.Volume, have *state.Actual) planner {
	p := planner{want: want, have: have, stack: have.Stack(), plan: Plan{Verdicts: make(Verdicts, 0, 1+len(want.Targets))}}
	own := func() *state.Actual { // what was observed must not change
		if p.have == have {
			copied := *have
			copied.Targets = slices.Clone(have.Targets)
			p.have = &copied
		}
		return p.have
	}
	unseen := func(m state.Mountpoint) bool { return m.File == state.UnknownFile && m.Err == nil }
	if unseen(have.Stage) {
		own().Stage.Err = errUnseen
	}
	for path := range want.Targets {
		if m := have.Targets.At(path); unseen(m) {
			m.Err = errUnseen
			own().Targets.Set(path, m)
		}
	}
	if c := have.Contents; c.Kind == state.ContentsUnread && c.Err == nil && needsContents(want, have) {
		own().Contents.Err = errUnseen
	}
	return p
}

var errUnseen = state.Errorf(state.Unavailable, "it was not looked at, so nothing is known of it now")

func (p *planner) setVerdict(part state.Part, v Verdict) {
	at, found := p.plan.Verdicts.find(part)
	if !found {
		p.plan.Verdicts = slices.Insert(p.plan.Verdicts, at, partVerdict{part: part})
	}
	p.plan.Verdicts[at].verdict = v
}

// do adds a step; the verdict is that the part is under way.
func (p *planner) do(action Action, part state.Part) Verdict {
	return p.doOn("", action, part)
}

// doOn is do for a step on a layer.
func (p *planner) doOn(layer string, action Action, part state.Part) Verdict {
	if v := p.allowed(action); !v.Settled {
		return v
	}
	p.plan.Steps = append(p.plan.Steps, Step{action, part, layer})
	return Verdict{}
}

// allowed judges a step on a source that other nodes can reach. Binds of what is still
// mounted are restored, but nothing else is set up unless a caller waits: after a fence
// another node may be writing.
func (p *planner) allowed(action Action) Verdict {
	source := p.stack[0].Device
	if !source.Shared {
		return settled
	}
	switch action {
	case BeginFormat, CreateLayer, Erase, Format:
		if !source.Exclusive {
			return stuck(state.FailedPrecondition, "the volume's storage can be reached by other nodes, and nothing proves that none of them uses it: it is not formatted. Use an access mode and a driver that attach it to one node at a time")
		}
	case Attach, OpenLayer, Check, Mount:
	case Unmount, Detach, CloseLayer: // unless the volume ends, it is set up anew afterwards
		if p.want.Stage.Gone || action == Unmount && !p.broken() {
			return settled
		}
	default:
		return settled
	}
	if !callerNeedsStage(p.want) {
		return stuck(state.Unavailable, "the volume's storage can be reached by other nodes, so what was lost of it is set up again only when somebody asks: by a stage or a publish")
	}
	return settled
}

var settled = Verdict{Settled: true}

// residue is the verdict on a removal that leaves what the plugin did not make.
func residue(format string, args ...any) Verdict {
	v := stuck(state.FailedPrecondition, format, args...)
	v.Settled = true
	return v
}

func stuck(class state.Class, format string, args ...any) Verdict {
	return Verdict{Problem: Problem{class, fmt.Sprintf(format, args...)}}
}

// stuckOn is the verdict on a part that an error keeps from being made.
func stuckOn(err error) Verdict { return stuck(state.ClassOf(err), "%v", err) }

// unknownDevice reports whether it is unknown which devices are the volume's, so
// that a mount which is not seen to be of them may be of one.
func (p *planner) unknownDevice() bool {
	return p.have.Device.State == state.DeviceUnknown || p.have.View.State == state.DeviceUnknown ||
		slices.ContainsFunc(p.have.Lower, func(e state.Element) bool { return e.Device.State == state.DeviceUnknown })
}

// unseenDevice is the verdict on what depends on such a device.
func (p *planner) unseenDevice() Verdict {
	if err := p.have.Device.Err; err != nil {
		return stuckOn(err)
	}
	return stuck(state.Unavailable, "whether the volume has a device is not known now")
}

// ours reports whether a mount is of the volume's device or of its view.
func (p *planner) ours(m state.Mount) bool {
	return m.Is(p.have.Device.Number) || m.Is(p.have.View.Number) || p.have.Source.Is(m) || p.oursPulled(m)
}

// oursPulled reports whether the devices of the volume and of a mount at one of its paths
// have both gone. Such a mount counts as the volume's if the type is right: a file system
// with a number of its own, such as btrfs, does not tell which device it was on.
func (p *planner) oursPulled(m state.Mount) bool {
	s, d := p.want.Stage, p.have.Device
	return m.Pulled && m.Root == "/" && s != nil && s.Capability.FSType == m.FSType && d.State == state.DeviceAbsent && d.Number != state.DeviceNumber{}
}

// oursAt is ours for a target, which remembers the number of its device node, or from what it was mounted.
func (p *planner) oursAt(t *state.Target, m state.Mount) bool {
	return p.ours(m) || m.Node && m.Is(t.Device) || t.From.Is(m)
}

// bound returns the parts of the targets at which the volume is still mounted.
func (p *planner) bound() []state.Part {
	return p.targets(func(t *state.Target, m state.Mountpoint) bool {
		return slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return p.oursAt(t, m) })
	})
}

// maybeBound is bound and the targets that could not be looked at.
func (p *planner) maybeBound() []state.Part {
	return append(p.bound(), p.targets(func(_ *state.Target, m state.Mountpoint) bool { return unknown(m) })...)
}

func (p *planner) targets(such func(*state.Target, state.Mountpoint) bool) []state.Part {
	var parts []state.Part
	for _, path := range p.want.TargetPaths() {
		if such(p.want.Targets[path], p.have.Targets.At(path)) {
			parts = append(parts, state.TargetPart(path))
		}
	}
	return parts
}

// unknown reports whether something may be mounted at a path that could not be
// looked at. A final error means that nothing can be mounted at such a path.
func unknown(m state.Mountpoint) bool { return m.Err != nil && !state.ClassOf(m.Err).Final() }

// describe says what is mounted at a path that should be something else.
func describe(m state.Mount) string { return report.DescribeMount(m) }
