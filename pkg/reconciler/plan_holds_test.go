package reconciler_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// ---- What holds, judged from the desired and the actual state alone. ----

// planCase is one desired and one actual state, and the plan for them.
type planCase struct {
	want   *state.Volume
	parts  []state.Part     // of want
	layer  string           // of the step that is judged
	target *state.Target    // of the part that is judged, nil for others
	place  state.Mountpoint // of that part
	have   state.Actual
	plan   reconciler.Plan
}

func (c *planCase) String() string {
	want, err := json.Marshal(c.want)
	if err != nil {
		return err.Error()
	}
	return strings.Join([]string{
		fmt.Sprintf("want %s", want),
		fmt.Sprintf("device %+v", c.have.Device), fmt.Sprintf("view %+v", c.have.View),
		fmt.Sprintf("contents %+v", c.have.Contents), fmt.Sprintf("stage %+v", c.have.Stage),
		fmt.Sprintf("targets %+v", c.have.Targets),
		fmt.Sprintf("steps %v", c.plan.Steps), fmt.Sprintf("verdicts %+v", c.plan.Verdicts),
	}, "\n")
}

func (c *planCase) steps(part state.Part) []reconciler.Step {
	var steps []reconciler.Step
	for _, step := range c.plan.Steps {
		if step.Part == part {
			steps = append(steps, step)
		}
	}
	return steps
}

// ownSteps leaves out the two steps that are planned whatever is asked of their
// part: detaching an idle view and growing into the device.
func (c *planCase) ownSteps(part state.Part) []reconciler.Step {
	return slices.DeleteFunc(c.steps(part), func(s reconciler.Step) bool {
		return s.Action == reconciler.DetachView && c.stageWanted()
	})
}

func (c *planCase) stageWanted() bool { return c.want.Stage != nil && !c.want.Stage.Gone }

// typeOpen reports whether the stage takes whatever file system is there.
func (c *planCase) typeOpen() bool {
	return c.stageWanted() && !c.wantsBlock() && c.want.Stage.Capability.FSType == ""
}

func (c *planCase) wantsBlock() bool {
	return c.want.Stage != nil && c.want.Stage.Capability.Access == state.BlockAccess
}

func (c *planCase) wantsView(t *state.Target) bool {
	return t.Capability.Access == state.BlockAccess && t.ReadOnly && !c.have.Device.ReadOnly
}

// takesRawWrites reports whether who has the target can write to the device.
func (c *planCase) takesRawWrites(t *state.Target) bool {
	return t.Capability.Access == state.BlockAccess && !t.ReadOnly && !c.have.Device.ReadOnly
}

// maybeBlank reports whether a look found nothing that speaks against a format.
func (c *planCase) maybeBlank() bool {
	return c.have.Contents.Kind == state.ContentsBlank || c.have.Contents.Kind == state.ContentsUnproven
}

func (c *planCase) someTargetWantsView() bool {
	for _, t := range c.want.Targets {
		if !t.Gone && c.wantsView(t) {
			return true
		}
	}
	return false
}

// viewLags reports whether a target wants the view, and it is smaller than its device.
func (c *planCase) viewLags() bool {
	v := c.have.View
	return v.State == state.DeviceAttached && v.Size < c.have.Device.Size && c.someTargetWantsView()
}

// node is the device whose node a block target shows.
func (c *planCase) node(t *state.Target) state.DeviceNumber {
	if c.wantsView(t) {
		return c.have.View.Number
	}
	return c.have.Device.Number
}

func (c *planCase) numberChanged(t *state.Target) bool {
	return t.Capability.Access == state.BlockAccess && t.Accepted && t.Device != state.DeviceNumber{} && t.Device != c.node(t)
}

// mountOf reports whether m is all of a device: its file system or its node.
func mountOf(m state.Mount, n state.DeviceNumber) bool {
	return n != state.DeviceNumber{} && m.Device == n && (m.Node || m.Root == "/")
}

func wholeOf(m state.Mount, n state.DeviceNumber) bool { return mountOf(m, n) && !m.Node }

// sourced reports whether the volume is mounted from a source and has no device.
func (c *planCase) sourced() bool { return c.have.Source != nil }

// whole reports whether a mount is all of the file system that targets show.
func (c *planCase) whole(m state.Mount) bool {
	if c.sourced() {
		return m.FSType == planSource.FSType && m.Source == planSource.Source && m.Root == "/"
	}
	return wholeOf(m, c.have.Device.Number)
}

// shows reports whether a mount is one of the volume.
func (c *planCase) shows(m state.Mount) bool {
	return c.sourced() && c.whole(m) || mountOf(m, c.have.Device.Number) || mountOf(m, c.have.View.Number)
}

// showsAt is shows at a target, nil for the staging path. A node that the
// target was seen with is the volume's still when the device has gone.
func (c *planCase) showsAt(t *state.Target, m state.Mount) bool {
	return c.shows(m) || t != nil && m.Node && mountOf(m, t.Device)
}

// somewhere reports whether a mount at any path of the record is such.
func (c *planCase) somewhere(such func(*state.Target, state.Mount) bool) bool {
	for _, m := range c.have.Stage.Mounts {
		if such(nil, m) {
			return true
		}
	}
	return c.atSomeTarget(such)
}

func (c *planCase) atSomeTarget(such func(*state.Target, state.Mount) bool) bool {
	for path, t := range c.want.Targets {
		for _, m := range c.have.Targets.At(path).Mounts {
			if such(t, m) {
				return true
			}
		}
	}
	return false
}

func (c *planCase) someTargetBound() bool { return c.atSomeTarget(c.showsAt) }

// someTargetUnseen reports whether a target could not be looked at, for a
// reason other than that nothing can be mounted there.
func (c *planCase) someTargetUnseen() bool {
	for path := range c.want.Targets {
		if unseen(c.have.Targets.At(path)) {
			return true
		}
	}
	return false
}

// notSeen reports whether nothing is known of a path.
func notSeen(m state.Mountpoint) bool { return m.Err != nil || m.File == state.UnknownFile }

// unseen reports whether something may be mounted at a path of which nothing is known.
func unseen(m state.Mountpoint) bool {
	return notSeen(m) && (m.Err == nil || !state.ClassOf(m.Err).Final())
}

// contentsUnseen reports whether nothing is known of what the device holds.
func (c *planCase) contentsUnseen() bool {
	return c.have.Contents.Err != nil || c.have.Contents.Kind == state.ContentsUnread
}

// unknown reports whether it is unknown which devices are the volume's.
func (c *planCase) unknown() bool {
	return c.have.Device.State == state.DeviceUnknown || c.have.View.State == state.DeviceUnknown || c.source().State == state.DeviceUnknown
}

func (c *planCase) holdsFilesystem() bool {
	f := c.have.Contents
	return f.Err == nil && f.Kind == state.ContentsFilesystem && f.FSType == c.want.Stage.Capability.FSType
}

// remembers reports whether the stage was seen to hold with a file system.
func (c *planCase) remembers() bool { return c.want.Stage != nil && c.want.Stage.UUID != "" }

// mountedByOther reports whether something is mounted in the place of a stage that was seen
// to hold, and is not known to be the volume's.
func (c *planCase) mountedByOther() bool {
	return c.remembers() && len(c.have.Stage.Mounts) > 0 && !c.somewhere(c.showsAt)
}

// mountedByUnknown reports whether a disk of which nothing is known is mounted in the place of a
// stage that was not refused.
func (c *planCase) mountedByUnknown() bool {
	m := c.have.Stage.Mounts
	return !c.want.Stage.Withdrawn && len(m) > 0 && !m[0].Node && m[0].Device.Major != 0
}

// swapped reports whether the device shows another file system than that one.
func (c *planCase) swapped() bool {
	f := c.have.Contents
	return c.remembers() && f.Err == nil && f.UUID != "" && f.UUID != c.want.Stage.UUID
}

// broken reports whether the volume's file system is broken where it is mounted,
// at the staging path or, when nothing is mounted there, at a target.
func (c *planCase) broken() bool {
	if len(c.have.Stage.Mounts) > 0 {
		return c.corrupt(c.have.Stage)
	}
	for _, m := range c.have.Targets.All() {
		if c.corrupt(m) {
			return true
		}
	}
	return false
}

func (c *planCase) corrupt(m state.Mountpoint) bool {
	for _, mount := range m.Mounts {
		if !wholeOf(mount, c.have.Device.Number) || mount.Node {
			return false
		}
	}
	return len(m.Mounts) > 0 && m.Mounts[0].Corrupt
}

// brokenCause reports whether a broken file system must stay: something keeps it
// that is not the record's, or its data is not there to be mounted anew.
func (c *planCase) brokenCause() bool {
	return c.contentsUnseen() || slices.ContainsFunc(brokenCauses, func(cause *planCause) bool { return cause.when(c) })
}

// brokenElsewhere reports whether a target that shows it, or may, is not broken too.
func (c *planCase) brokenElsewhere() bool {
	for path, t := range c.want.Targets {
		m := c.have.Targets.At(path)
		bound := slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return c.showsAt(t, m) })
		if unseen(m) || bound && !c.corrupt(m) {
			return true
		}
	}
	return false
}

// freePath reports whether something may be mounted at a path: nothing is
// there, or an empty directory or file of the kind.
func freePath(m state.Mountpoint, kind state.FileType) bool {
	return !notSeen(m) && len(m.Mounts) == 0 && (m.File == state.NoFile && !m.InFile || m.File == kind && m.Empty)
}

// attributesMet reports whether a mount has the attributes that flags and the
// read-only setting ask for. Only the flags that worlds know count.
func attributesMet(a state.Attributes, readOnly bool, flags ...string) bool {
	readOnly = readOnly || slices.Contains(flags, "ro")
	return (a&state.ReadOnly != 0) == readOnly && (a&state.NoDev != 0 || !slices.Contains(flags, "nodev"))
}

func (c *planCase) deviceAsAsked() bool {
	d := c.have.Device
	if c.layered() && (d.State != state.DeviceAttached || d.Unmade || d.Err != nil || d.Size < d.Capacity || d.ReadOnly != c.want.Stage.ReadOnly || c.source().Formatting) {
		return false
	}
	return c.sourceAsAsked()
}

// stageAsAsked reports whether the wanted stage is exactly as asked.
func (c *planCase) stageAsAsked() bool {
	s, mounts := c.want.Stage, c.have.Stage.Mounts
	if c.sourced() {
		return !c.sourceCause()
	}
	if !c.deviceAsAsked() || c.wantsBlock() {
		return c.deviceAsAsked() && !c.rawCause()
	}
	if notSeen(c.have.Stage) || len(mounts) == 0 || len(mounts) > 1 && c.shows(mounts[1]) {
		return false
	}
	m := mounts[0]
	return wholeOf(m, c.have.Device.Number) && m.FSType == s.Capability.FSType && !m.Corrupt && !c.swapped() &&
		(s.ReadOnly || !m.SuperReadOnly) && attributesMet(m.Attributes, s.ReadOnly, s.Capability.Flags...)
}

// targetAsAsked reports whether a wanted target is exactly as asked.
func (c *planCase) targetAsAsked(t *state.Target) bool {
	m := c.have.Targets.At(t.Path)
	if !c.stageWanted() || !c.stageAsAsked() || notSeen(m) || len(m.Mounts) == 0 || len(m.Mounts) > 1 && c.showsAt(t, m.Mounts[1]) {
		return false
	}
	top := m.Mounts[0]
	if t.Capability.Access == state.BlockAccess {
		return top.Node && mountOf(top, c.node(t)) && !c.numberChanged(t) && (!c.wantsView(t) || c.have.View.State == state.DeviceAttached) &&
			(!c.takesRawWrites(t) || c.have.Device.Raw)
	}
	s := c.want.Stage
	return c.whole(top) && !top.Corrupt &&
		attributesMet(top.Attributes, s.ReadOnly || t.ReadOnly, append(slices.Clone(s.Capability.Flags), t.Capability.Flags...)...)
}

// takenDown reports whether nothing of the volume is left that can be known for it.
func (c *planCase) takenDown() bool {
	d := c.source()
	return !notSeen(c.have.Stage) && !c.somewhere(c.showsAt) && !c.someTargetUnseen() && c.have.View.State == state.DeviceAbsent &&
		!(c.layered() && (c.open() || c.have.Device.State == state.DeviceUnknown)) && (d.State == state.DeviceAbsent || d.State == state.DeviceForeign)
}

// holds reports whether a part is exactly as asked.
func (c *planCase) holds(part state.Part) bool {
	d, f := c.source(), c.have.Contents
	switch part.Kind {
	case state.StageKind:
		if c.stageWanted() {
			return c.stageAsAsked()
		}
		if c.stagedUnrecorded() {
			return true
		}
		return c.takenDown() && !c.mountedByOther() && !c.mountedByUnknown()
	case state.SizeKind:
		if !c.stageWanted() || !c.stageAsAsked() || c.sourced() || d.Size < c.want.Size.Bytes {
			return false
		}
		if c.wantsBlock() {
			return !c.viewLags()
		}
		return !c.contentsUnseen() && (f.Kind != state.ContentsOther || c.want.Size.Accepted) && (!f.Growable || c.want.Size.Accepted && (!f.GrowsMounted || c.want.Stage.ReadOnly))
	}
	t, m := c.want.Targets[part.Path], c.have.Targets.At(part.Path)
	switch {
	case !t.Gone:
		return c.targetAsAsked(t)
	case notSeen(m):
		return t.Withdrawn && !unseen(m)
	case c.unknown() && len(m.Mounts) > 0:
		return false // it may be the volume's
	}
	return (t.Withdrawn || m.File == state.NoFile || c.have.Unfit[part] != nil) && !slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return c.showsAt(t, m) })
}

// publishedUnrecorded reports whether the volume may be published where no record says so.
func (c *planCase) publishedUnrecorded() bool {
	return slices.ContainsFunc(c.have.Others, func(at string) bool { return at != "/plugins/v/globalmount" })
}

// stagedUnrecorded reports whether the volume may be staged where no record says so, and
// has nothing at its paths.
func (c *planCase) stagedUnrecorded() bool {
	return slices.ContainsFunc(c.have.Others, func(at string) bool { return at != "/pods/c/volume" }) && !notSeen(c.have.Stage) && len(c.have.Stage.Mounts) == 0 &&
		!c.someTargetBound() && !c.someTargetUnseen() && c.have.View.State == state.DeviceAbsent
}

// leftBehind reports whether a target that is to go shows nothing of the volume
// and something that the plugin did not make, or whether a stage that is to go is, or
// may be, what targets of which no record is left were bound from, or something of which
// nothing is known is mounted in its place.
func (c *planCase) leftBehind(part state.Part) bool {
	t, m := c.want.Targets[part.Path], c.have.Targets.At(part.Path)
	if part == state.StagePart() {
		m = c.have.Stage
		if c.takenDown() && !c.mountedByOther() && c.mountedByUnknown() {
			return true
		}
		return c.publishedUnrecorded() && !c.unknown() && !notSeen(m) && len(m.Mounts) > 0 && c.shows(m.Mounts[0]) && !c.someTargetBound() && !c.someTargetUnseen()
	}
	if t == nil || !t.Gone || notSeen(m) || c.unknown() && len(m.Mounts) > 0 || slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return c.showsAt(t, m) }) {
		return false
	}
	return len(m.Mounts) > 0 || !m.Empty || m.File != state.Directory && m.File != state.RegularFile
}

// rightKind reports whether a mount is what the plugin binds at such a target,
// right or wrong in detail: a node, or the file system on the device itself.
func (c *planCase) rightKind(t *state.Target, m state.Mount) bool {
	if t.Capability.Access == state.BlockAccess {
		return m.Node
	}
	return c.whole(m)
}

// fileFor is what a target is made as.
func fileFor(t *state.Target) state.FileType {
	if t.Capability.Access == state.BlockAccess {
		return state.RegularFile
	}
	return state.Directory
}

// sourceCause tells why a volume cannot be mounted from its source.
func (c *planCase) sourceCause() bool {
	d := c.have.Device
	return d.Err != nil || d.Missing || c.wantsBlock() || c.want.Stage.Capability.FSType != planSource.FSType
}

// rawCause tells why a device that stands must not be shown raw: its file
// system is or may be mounted, or the next mount would erase it.
func (c *planCase) rawCause() bool {
	s := c.want.Stage
	return notSeen(c.have.Stage) || slices.ContainsFunc(c.have.Stage.Mounts, c.shows) ||
		c.have.Device.Formatting && !c.layered() && !s.ReadOnly && !s.Accepted
}

// asked reports whether a caller waits for the stage, or for a target that needs it.
func (c *planCase) asked() bool {
	for _, t := range c.want.Targets {
		if t.CallerWaits && !t.Gone {
			return true
		}
	}
	return c.want.Stage != nil && c.want.Stage.CallerWaits
}

// stranger reports whether the device is, or may be, another than the one that
// the stage was seen with.
func (c *planCase) stranger() bool {
	s, d := c.want.Stage, c.source()
	return s != nil && s.Identity != "" && d.Identity != s.Identity && (d.Identity != "" || d.State == state.DeviceAttached)
}

// firstOf returns the words after the first condition that is true.
func firstOf(pairs ...any) string {
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i].(bool) {
			return pairs[i+1].(string)
		}
	}
	return ""
}
