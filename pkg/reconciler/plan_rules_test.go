package reconciler_test

import (
	"fmt"
	"slices"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// ---- Rules for steps: what must hold for a step to be planned. ----

type planStepRule struct {
	name   string
	broken func(c *planCase, part state.Part) string // why, empty when the rule holds
}

var planStepRules = map[reconciler.Action]planStepRule{
	reconciler.Unbind: {"unbind takes only the volume's own mount from a target that must not be so", func(c *planCase, part state.Part) string {
		t, m := c.want.Targets[part.Path], c.have.Targets.At(part.Path)
		return firstOf(
			t == nil, "no such target",
			notSeen(m), "the path was not seen",
			len(m.Mounts) == 0 || !c.showsAt(t, m.Mounts[0]), "the top mount is not the volume's",
			t != nil && !t.Gone && c.targetAsAsked(t), "the target is as asked",
			t != nil && !t.Gone && c.broken() && c.brokenCause(), "a pod loses what is broken and stays so")
	}},
	reconciler.RemoveTarget: {"remove-target takes only what is empty, unmounted and asked away by the CO", func(c *planCase, part state.Part) string {
		t, m := c.want.Targets[part.Path], c.have.Targets.At(part.Path)
		return firstOf(
			t == nil || !t.Gone, "the target is not to go",
			t != nil && t.Withdrawn, "what a refused request found is not its to remove",
			c.have.Unfit[part] != nil, "it is part of a volume's data",
			notSeen(m), "the path was not seen",
			len(m.Mounts) > 0, "something is mounted",
			!m.Empty, "it is not empty",
			m.File != state.Directory && m.File != state.RegularFile, "neither a directory nor a file")
	}},
	reconciler.Unmount: {"unmount never takes the stage from under a target, nor what is not the volume's", func(c *planCase, part state.Part) string {
		s, m := c.want.Stage, c.have.Stage
		doubled := len(m.Mounts) > 1 && c.shows(m.Mounts[1])
		return firstOf(
			part != state.StagePart() || s == nil, "not for the stage",
			notSeen(m), "the path was not seen",
			len(m.Mounts) == 0 || !c.shows(m.Mounts[0]), "the top mount is not the volume's",
			c.publishedUnrecorded(), "a target of which no record is left may be mounted from it",
			c.stageWanted() && c.stageAsAsked(), "the stage is as asked",
			c.stageWanted() && c.broken() && c.brokenCause(), "what is broken is taken down and stays so",
			!(doubled && c.stageWanted()) && c.someTargetBound(), "a target is mounted from it",
			!(doubled && c.stageWanted()) && c.someTargetUnseen(), "a target that was not seen may be mounted from it")
	}},
	reconciler.Release: {"release empties only the unmounted directory of a stage that ends", func(c *planCase, part state.Part) string {
		s, m := c.want.Stage, c.have.Stage
		return firstOf(
			part != state.StagePart() || s == nil || !s.Gone, "the stage is not to go",
			notSeen(m), "the path was not seen",
			len(m.Mounts) > 0, "something is mounted",
			m.File != state.Directory || !m.Empty, "it is no empty directory",
			!c.highest().Held, "nobody holds the device",
			c.someTargetBound() || c.someTargetUnseen(), "a target is or may be mounted from it")
	}},
	reconciler.DetachView: {"detach-view never takes a view that is shown, wanted or held", func(c *planCase, part state.Part) string {
		v := c.have.View
		return firstOf(
			part != state.StagePart() || c.want.Stage == nil, "not for the stage",
			v.State != state.DeviceAttached, "no view is attached",
			v.Held, "the view is held",
			c.somewhere(func(_ *state.Target, m state.Mount) bool { return mountOf(m, v.Number) }), "the view is mounted",
			c.someTargetUnseen(), "a target that was not seen may show it",
			c.stageWanted() && c.someTargetWantsView(), "a target wants the view")
	}},
	reconciler.Detach: {"detach never takes a device that is mounted, held or under a view", func(c *planCase, part state.Part) string {
		s, d := c.want.Stage, c.source()
		return firstOf(
			part != state.StagePart() || s == nil, "not for the stage",
			c.layered() && c.open(), "a layer is over it",
			d.State != state.DeviceAttached, "no device is attached",
			d.Held, "the device is held",
			c.have.View.State != state.DeviceAbsent, "a view is over it",
			c.somewhere(c.showsAt), "the device is mounted",
			unseen(c.have.Stage) && !c.wantsBlock(), "the device may be mounted at the staging path, which was not seen",
			c.someTargetUnseen(), "a target that was not seen may show the device",
			c.stageWanted() && c.stranger(), "it is another device than the stage was seen with",
			c.stageWanted() && d.NeedsSecret, "it could not be attached again",
			c.stageWanted() && d.ReadOnly == s.ReadOnly, "the device is as asked")
	}},
	reconciler.Choose: {"choose needs a stage that leaves its type open, and a volume that can be had", func(c *planCase, part state.Part) string {
		d := c.source()
		return firstOf(
			part != state.StagePart() || !c.typeOpen(), "no type is left open",
			c.unknown() || d.Err != nil || d.Missing, "the volume is not known, or not there",
			c.layered() && !c.deviceAsAsked(), "what is on the layer is not seen yet",
			c.layered() && c.contentsUnseen(), "what is on the layer was not read")
	}},
	reconciler.Attach: {"attach never takes a device that is missing, foreign, truncated or attached", func(c *planCase, part state.Part) string {
		d := c.source()
		return firstOf(
			part != state.StagePart() || !c.stageWanted(), "no stage is wanted",
			d.Err != nil, "what the backend knows was not read",
			d.Missing, "the backend knows no such volume",
			c.stranger(), "it is another device than the stage was seen with",
			d.State == state.DeviceForeign, "something else uses the backing",
			d.State == state.DeviceAttached, "the device is attached",
			d.NeedsSecret, "its secret is not at hand",
			d.State == state.DeviceAbsent && d.Size < d.Capacity, "the backing was truncated",
			c.have.Device.State == state.DeviceAbsent && !c.wantsBlock() && len(c.have.Stage.Mounts) == 0 && !freePath(c.have.Stage, state.Directory), "the mount would fail: the staging path is not free")
	}},
	reconciler.GrowDevice: {"grow-device only grows an attached device of a wanted stage", func(c *planCase, part state.Part) string {
		d := c.source()
		bySize := part == state.SizePart()
		return firstOf(
			!c.stageWanted(), "no stage is wanted",
			c.stranger(), "it is another device than the stage was seen with",
			d.Err != nil, "what the backend knows was not read",
			d.State != state.DeviceAttached || d.Missing, "no device is attached",
			c.stranger(), "it is another device than the stage was seen with",
			!bySize && d.Size >= d.Capacity, "the device has its size",
			bySize && (c.want.Size == nil || d.Size >= c.want.Size.Bytes), "the device has the size wanted",
			bySize && !c.stageAsAsked(), "the stage is not as asked")
	}},
	reconciler.BeginFormat: {"begin-format needs a provably blank device that never was formatted", func(c *planCase, part state.Part) string {
		d := c.have.Device
		if c.layered() {
			return firstOf(c.whyNotMake() != "", c.whyNotMake(), c.source().Formatting, "it has the mark", c.source().Proved, "it was proved just now", !blankKind(c.have.Beneath.Kind), "the source is not blank")
		}
		return c.whyNotWrite(part, firstOf(
			!c.maybeBlank(), "the device is not blank",
			d.Formatting, "it has the mark",
			d.Proved, "it was proved just now",
			d.Raw, "it was published raw",
			d.Size < c.have.Smallest, "it is too small",
			d.Formatted != "", "it was formatted before",
			c.remembers(), "the stage was seen with a file system"))
	}},
	reconciler.Erase: {"erase needs the formatting mark, and that nobody else can have had the device since", func(c *planCase, part state.Part) string {
		if c.layered() && c.layer == "" {
			return firstOf(c.whyNotMake() != "", c.whyNotMake(), !c.source().Formatting, "without the mark", c.source().StaleMark, "with a mark that is stale", foreignTo(c.source(), c.have.Beneath), "it is not of the format")
		}
		return c.whyNotWrite(part, firstOf(
			!c.have.Device.Formatting, "without the mark",
			foreignTo(c.have.Device, c.have.Contents), "it is not of the format",
			c.have.Device.StaleMark, "with a mark that is stale",
			c.have.Device.Raw, "it was published raw",
			c.have.Device.Size < c.have.Smallest, "it is too small",
			c.remembers(), "the stage was seen with a file system"))
	}},
	reconciler.AbandonFormat: {"abandon-format needs a mark with a UUID, and something that does not bear it", func(c *planCase, part state.Part) string {
		d, found := c.source(), c.have.Contents
		if c.layered() {
			found = c.have.Beneath
		}
		return firstOf(
			part != state.StagePart() || !c.stageWanted() || !c.sourceAsAsked(), "no stage is wanted, or its source is not as asked",
			!d.Formatting || d.FormatUUID == "", "there is no such mark",
			d.StaleMark, "the mark is stale",
			c.layered() && c.open(), "the layer is open",
			c.layered() && !c.have.Device.Unmade && c.have.Device.Fresh, "the layer is new",
			(!c.layered() || c.have.Device.Unmade) && found.Origin != state.OriginOther, "nothing says that it is somebody's")
	}},
	reconciler.Format: {"format needs the formatting mark, or a device that is marked late, and a provably blank device", func(c *planCase, part state.Part) string {
		d := c.have.Device
		return c.whyNotWrite(part, firstOf(
			!d.Formatting && !(d.Noted && d.Proved), "without the mark",
			!d.Formatting && d.Formatted != "", "it was formatted before",
			c.have.Device.Raw, "it was published raw",
			c.have.Device.Size < c.have.Smallest, "it is too small",
			!c.maybeBlank(), "the device is not blank",
			c.remembers(), "the stage was seen with a file system"))
	}},
	reconciler.CreateLayer: {"create-layer needs a blank source with the mark", func(c *planCase, part state.Part) string {
		if d := c.have.Device; !d.Unmade {
			return firstOf(!c.layered() || !c.source().Attached(), "no source", !c.source().Formatting, "without the mark", c.source().ReadOnly || c.want.Stage == nil || c.want.Stage.ReadOnly, "nothing is to be written", !d.Fresh || c.open(), "the layer is in use, or not new")
		}
		d := c.source()
		return firstOf(c.whyNotMake() != "", c.whyNotMake(), !d.Formatting && !(d.Noted && d.Proved), "without the mark", !blankKind(c.have.Beneath.Kind), "the source is not blank")
	}},
	reconciler.OpenLayer: {"open-layer needs a source that is as asked, the layer on it, and its secret", func(c *planCase, part state.Part) string {
		d := c.have.Device
		return firstOf(
			part != state.StagePart() || !c.stageWanted() || !c.layered(), "no stage with a layer is wanted",
			!c.sourceAsAsked(), "the source is not as asked",
			c.source().Formatting, "its making is not over",
			d.Unmade, "there is no layer",
			d.Err != nil || d.State != state.DeviceAbsent && d.State != state.DeviceDetaching, "it is there, or something else is",
			d.NeedsSecret, "its secret is not at hand")
	}},
	reconciler.CloseLayer: {"close-layer never takes a device that is mounted or held, nor one that could not be opened again", func(c *planCase, part state.Part) string {
		s, d := c.want.Stage, c.have.Device
		return firstOf(
			part != state.StagePart() || s == nil || !c.layered(), "no stage with a layer",
			!c.open(), "it is not there",
			d.Held, "it is held",
			c.somewhere(c.showsAt), "it is mounted",
			c.someTargetUnseen(), "a target that was not seen may show it",
			unseen(c.have.Stage) && !c.wantsBlock(), "it may be mounted at the staging path, which was not seen",
			c.stageWanted() && !d.Stray && d.ReadOnly == s.ReadOnly && c.source().ReadOnly == s.ReadOnly && !c.source().Formatting, "it is as asked",
			c.stageWanted() && !d.Stray && d.NeedsSecret, "its secret is not at hand")
	}},
	reconciler.GrowLayer: {"grow-layer only grows an attached device of a layer", func(c *planCase, part state.Part) string {
		d := c.have.Device
		return firstOf(
			!c.stageWanted() || !c.layered() || !c.sourceAsAsked(), "no stage with a layer is wanted, or its source is not as asked",
			d.State != state.DeviceAttached || d.Size >= d.Capacity, "it is not there, or has its size",
			d.NeedsSecret, "its secret is not at hand")
	}},
	reconciler.Check: {"check needs an idle device with the file system asked for", func(c *planCase, part state.Part) string {
		return c.whyNotWrite(part, firstOf(
			!c.holdsFilesystem() || c.swapped(), "not the file system asked for",
			!c.have.Contents.NeedsCheck, "no check is needed"))
	}},
	reconciler.GrowFilesystem: {"grow-filesystem grows as this kind of file system can", func(c *planCase, part state.Part) string {
		f := c.have.Contents
		if part == state.SizePart() {
			return firstOf(
				!c.stageWanted() || !c.stageAsAsked() || c.wantsBlock(), "the file system is not mounted as asked",
				c.contentsUnseen() || !f.Growable || !f.GrowsMounted, "it does not grow mounted",
				c.want.Stage.ReadOnly, "it is read-only")
		}
		return c.whyNotWrite(part, firstOf(
			!c.holdsFilesystem() || c.swapped(), "not the file system asked for",
			f.NeedsCheck, "it needs a check first",
			!f.Growable || !f.GrowsUnmounted, "it does not grow unmounted",
			f.GrowsMounted, "it grows mounted, which is later"))
	}},
	reconciler.Mount: {"mount needs the right device with the right file system, and a free path", func(c *planCase, part state.Part) string {
		s, m, f := c.want.Stage, c.have.Stage, c.have.Contents
		return firstOf(
			part != state.StagePart() || !c.stageWanted() || c.wantsBlock(), "no mounted stage is wanted",
			!c.deviceAsAsked(), "the device is not as asked",
			c.have.Device.Formatting, "a format was interrupted",
			c.broken(), "it is mounted and broken",
			c.swapped(), "the file system is not the one that the stage was seen with",
			!c.holdsFilesystem(), "not the file system asked for",
			f.NeedsCheck && s != nil && !s.ReadOnly && !c.mountedElsewhere(), "it needs a check first",
			!freePath(m, state.Directory), "the staging path is not free",
			f.Growable && f.GrowsUnmounted && !f.GrowsMounted && s != nil && !s.ReadOnly && !c.mountedElsewhere(), "it grows unmounted, which is now",
			m.File == state.NoFile && s != nil && s.Accepted && !c.asked(), "a removed directory is made again though nobody asks")
	}},
	reconciler.SetAttributes: {"set-attributes touches only the volume's own mount with the wrong attributes", func(c *planCase, part state.Part) string {
		if part == state.StagePart() {
			m := c.have.Stage
			return firstOf(
				!c.stageWanted() || c.wantsBlock(), "no mounted stage is wanted",
				notSeen(m) || len(m.Mounts) == 0 || !wholeOf(m.Mounts[0], c.have.Device.Number), "the top mount is not the stage",
				c.stageAsAsked(), "the stage is as asked")
		}
		t, m := c.want.Targets[part.Path], c.have.Targets.At(part.Path)
		return firstOf(
			t == nil || t.Gone, "the target is not wanted",
			notSeen(m) || len(m.Mounts) == 0 || !c.whole(m.Mounts[0]), "the top mount is not the volume's",
			t != nil && c.targetAsAsked(t), "the target is as asked")
	}},
	reconciler.AttachView: {"attach-view needs an attached writable device and a target that wants it", func(c *planCase, part state.Part) string {
		if part == state.SizePart() {
			return firstOf(!c.stageWanted() || !c.stageAsAsked(), "the stage is not as asked", !c.viewLags(), "the view has its size, or nobody wants it")
		}
		t := c.want.Targets[part.Path]
		return firstOf(
			t == nil || t.Gone || !c.wantsView(t), "the target wants no view",
			!c.stageWanted() || !c.stageAsAsked(), "the stage is not as asked",
			c.have.View.State == state.DeviceAttached, "the view is attached")
	}},
	reconciler.MarkRaw: {"mark-raw comes before a target that takes raw writes", func(c *planCase, part state.Part) string {
		t := c.want.Targets[part.Path]
		return firstOf(
			t == nil || t.Gone || t.Capability.Access != state.BlockAccess, "no raw target is wanted",
			!c.stageWanted() || !c.stageAsAsked(), "the stage is not as asked",
			!c.takesRawWrites(t), "nobody can write",
			c.have.Device.Raw, "it has the mark")
	}},
	reconciler.Bind: {"bind needs the stage as asked and a free target that may be made", func(c *planCase, part state.Part) string {
		t := c.want.Targets[part.Path]
		if t == nil || t.Gone {
			return "the target is not wanted"
		}
		return firstOf(
			c.sourced(), "there is nothing to bind",
			c.whyNotTarget(t) != "", c.whyNotTarget(t),
			c.wantsView(t) && c.have.View.State != state.DeviceAttached, "there is no view",
			c.takesRawWrites(t) && !c.have.Device.Raw, "nothing would remember that it was written raw",
			c.numberChanged(t), "the pod knows another number")
	}},
	reconciler.MountSource: {"mount-source needs a source, the stage as asked and a free target that may be made", func(c *planCase, part state.Part) string {
		t := c.want.Targets[part.Path]
		if t == nil || t.Gone {
			return "the target is not wanted"
		}
		return firstOf(!c.sourced(), "it has a device", c.whyNotTarget(t) != "", c.whyNotTarget(t))
	}},
}

// whyNotTarget says why nothing must be mounted at a target that is wanted.
func (c *planCase) whyNotTarget(t *state.Target) string {
	m := c.have.Targets.At(t.Path)
	return firstOf(
		!c.stageWanted() || !c.stageAsAsked(), "the stage is not as asked",
		!freePath(m, fileFor(t)), "the target is not free",
		m.File == state.NoFile && t.Accepted && !t.CallerWaits, "a removed target is made again though nobody asks")
}

// whyNotMake says why no layer must be made on the source.
func (c *planCase) whyNotMake() string {
	s, d := c.want.Stage, c.source()
	return firstOf(
		!c.layered() || !c.stageWanted() || !c.have.Device.Unmade || c.open(), "no layer is to be made",
		s != nil && s.ReadOnly || d.ReadOnly, "nothing is to be written",
		d.State != state.DeviceAttached || d.Missing || d.Err != nil, "no source is attached",
		c.stranger(), "it is another device than the stage was seen with",
		d.Held, "the source is held",
		d.Raw, "it was published raw",
		d.Formatted != "", "it bore a layer before",
		c.have.Device.NeedsSecret, "its secret is not at hand",
		c.have.Beneath.Err != nil || c.have.Beneath.Kind == state.ContentsUnread, "the source was not read",
		c.remembers(), "the stage was seen with a file system")
}

// foreignTo reports whether the mark of a device says what the format leaves, and what was found
// may be something else.
func foreignTo(d state.Device, found state.Contents) bool {
	return d.FormatUUID != "" && found.Origin != state.OriginFormat && found.Origin != state.OriginUnnamed
}

func blankKind(kind state.ContentsKind) bool {
	return kind == state.ContentsBlank || kind == state.ContentsUnproven
}

func (c *planCase) layered() bool { return len(c.have.Lower) > 0 }

// source is the device of the backend.
func (c *planCase) source() state.Device {
	if c.layered() {
		return c.have.Lower[0].Device
	}
	return c.have.Device
}

// open reports whether a device stands for the layer, be it on another element.
func (c *planCase) open() bool {
	d := c.have.Device
	return d.State == state.DeviceAttached || d.State == state.DeviceDetaching || d.Stray
}

// highest is the highest device of the stack that is there.
func (c *planCase) highest() state.Device {
	if c.layered() && !c.open() {
		return c.source()
	}
	return c.have.Device
}

// sourceAsAsked reports whether the device of the backend is as asked.
func (c *planCase) sourceAsAsked() bool {
	d := c.source()
	return d.State == state.DeviceAttached && !c.unknown() && !c.stranger() && d.Err == nil && !d.Missing && d.Size >= d.Capacity && d.ReadOnly == c.want.Stage.ReadOnly
}

// whyNotWrite says why a device must not be written to below a file system; why
// is a further reason.
func (c *planCase) whyNotWrite(part state.Part, why string) string {
	d := c.have.Device
	return firstOf(
		part != state.StagePart() || !c.stageWanted() || c.wantsBlock(), "no mounted stage is wanted",
		c.want.Stage != nil && c.want.Stage.ReadOnly, "read-only access was asked for",
		d.State != state.DeviceAttached || d.Missing, "no device is attached",
		d.Err != nil, "what the backend knows was not read",
		d.ReadOnly, "the device is read-only",
		c.have.View.Held, "its view is held",
		d.Held, "the device is held",
		c.somewhere(c.showsAt), "the device is mounted",
		c.contentsUnseen(), "the contents were not seen",
		notSeen(c.have.Stage), "the staging path was not seen",
		why != "", why)
}

// ---- Rules for plans. ----

var planStateRules = []struct {
	name   string
	broken func(c *planCase) string
}{
	{"settled means that it holds", func(c *planCase) string {
		for part, v := range c.plan.Verdicts.All() {
			if v.Settled && !c.holds(part) && (v.Problem == reconciler.Problem{} || !c.leftBehind(part)) {
				return part.String()
			}
		}
		return ""
	}},
	{"what holds is settled and left alone", func(c *planCase) string {
		for _, part := range c.parts {
			v := c.plan.Verdicts.Of(part)
			if c.holds(part) && (!v.Settled || v.Problem != reconciler.Problem{} || len(c.ownSteps(part)) > 0) {
				return part.String()
			}
		}
		return ""
	}},
	{"what is not known settles nothing, and is not taken for absent", func(c *planCase) string {
		for part, v := range c.plan.Verdicts.All() {
			m := c.have.Stage
			intent := c.want.Intent(part)
			if part.Kind == state.TargetKind {
				m = c.have.Targets.At(part.Path)
			}
			record := c.sourced() && part == state.StagePart() && c.stageWanted() // nothing stands at its path
			dark := unseen(m) && !record || c.unknown() && (part.Kind != state.TargetKind || !intent.Gone || len(m.Mounts) > 0)
			if dark && v.Settled {
				return part.String() + " is settled in the dark"
			}
		}
		for _, step := range c.plan.Steps {
			switch step.Action {
			case reconciler.Unbind, reconciler.RemoveTarget:
			case reconciler.Unmount, reconciler.DetachView: // of what is known; the device stays
				if c.have.Device.State == state.DeviceUnknown {
					return step.String() + " in the dark"
				}
			default:
				if c.unknown() {
					return step.String() + " in the dark"
				}
			}
		}
		return ""
	}},
	{"what other nodes can reach is set up for who asks only, and formatted if it is proven that nobody else has it", func(c *planCase) string {
		if !c.source().Shared {
			return ""
		}
		for _, step := range c.plan.Steps {
			switch step.Action {
			case reconciler.BeginFormat, reconciler.CreateLayer, reconciler.Erase, reconciler.Format:
				if !c.source().Exclusive {
					return step.String() + " without proof"
				}
			case reconciler.Attach, reconciler.OpenLayer, reconciler.Check, reconciler.Mount:
			case reconciler.Detach, reconciler.CloseLayer:
				if !c.stageWanted() {
					continue
				}
			case reconciler.Unmount, reconciler.Unbind:
				if !c.stageWanted() || !c.broken() || c.want.Intent(step.Part).Gone {
					continue
				}
			default:
				continue
			}
			if !c.asked() {
				return step.String() + " unasked"
			}
		}
		return ""
	}},
	{"the type of a file system is chosen before anything is done to a volume whose type is known, or to what is on a device", func(c *planCase) string {
		known := !c.layered() && (c.have.Device.Formatted != "" && !c.have.Device.Noted || c.have.Device.CreatedFor != "")
		for _, step := range c.ownSteps(state.StagePart()) {
			if c.typeOpen() && step.Action != reconciler.Choose && (known || c.deviceAsAsked()) {
				return step.String()
			}
		}
		return ""
	}},
	{"what is shown grows with its device, asked or not", func(c *planCase) string {
		f := c.have.Contents
		grows := c.stageWanted() && !c.sourced() && c.stageAsAsked() && !c.wantsBlock() && !c.want.Stage.ReadOnly && f.Growable && f.GrowsMounted
		follows := c.stageWanted() && !c.sourced() && c.stageAsAsked() && c.viewLags()
		return firstOf(
			grows && !slices.Contains(c.plan.Steps, reconciler.Step{Action: reconciler.GrowFilesystem, Part: state.SizePart()}), "the file system does not",
			follows && !slices.Contains(c.plan.Steps, reconciler.Step{Action: reconciler.AttachView, Part: state.SizePart()}), "the view does not")
	}},
	{"what is mounted from a source has steps at its paths only", func(c *planCase) string {
		for _, step := range c.plan.Steps {
			switch step.Action {
			case reconciler.Unbind, reconciler.RemoveTarget, reconciler.Unmount, reconciler.MountSource, reconciler.SetAttributes:
			default:
				if c.sourced() {
					return step.String()
				}
			}
		}
		return ""
	}},
	{"every part has one of four verdicts, and a step exactly when under way", func(c *planCase) string {
		if len(c.parts) != len(c.plan.Verdicts) {
			return fmt.Sprintf("%d verdicts for %d parts", len(c.plan.Verdicts), len(c.parts))
		}
		for _, part := range c.parts {
			v, known := c.plan.Verdicts.Lookup(part)
			steps := len(c.ownSteps(part))
			stuck := v.Problem != reconciler.Problem{}
			underWay := !v.Settled && !stuck && len(v.Needs) == 0
			why := firstOf(
				!known, "no verdict",
				underWay && steps == 0, "silently stuck",
				steps > 1 && part != state.SizePart(), "two steps at once", // a size may grow the device and the file system
				!underWay && steps != 0, "a step without need",
				len(v.Needs) > 0 && (v.Settled || stuck), "two verdicts",
				stuck && v.Problem.Text == "", "a problem without words")
			if why != "" {
				return part.String() + ": " + why
			}
		}
		return ""
	}},
	{"needs lead to a step or a problem, never in a circle", func(c *planCase) string {
		for part, v := range c.plan.Verdicts.All() {
			if len(v.Needs) > 0 && !c.leads(part, len(c.plan.Verdicts)) {
				return part.String()
			}
		}
		return ""
	}},
	{"what must go is planned before what must come, in the order of MakePlan", func(c *planCase) string {
		last := 0
		for _, step := range c.plan.Steps {
			r := c.rank(step)
			if r < last {
				return step.String() + " comes too late"
			}
			last = r
		}
		return ""
	}},
	{"no step is planned twice", func(c *planCase) string {
		for i, step := range c.plan.Steps {
			if slices.Contains(c.plan.Steps[:i], step) {
				return step.String()
			}
		}
		return ""
	}},
}

// rank is the place of a step: pods, stage, device for what must go, then
// device, stage, pods for what must come. A part that stays may need something
// taken away to be put right; that is part of its coming.
func (c *planCase) rank(step reconciler.Step) int {
	intent := c.want.Intent(step.Part)
	gone := intent != nil && intent.Gone
	switch {
	case gone && step.Part.Kind == state.TargetKind:
		return 0
	case gone:
		return 1
	case step.Action == reconciler.DetachView: // of a stage that stays: nobody shows it
		return 2
	case step.Part.Kind == state.StageKind:
		return 3
	case step.Part.Kind == state.SizeKind:
		return 4
	}
	return 5
}

// leads reports whether the needs of a part end at steps or problems within
// that many hops.
func (c *planCase) leads(part state.Part, hops int) bool {
	v, known := c.plan.Verdicts.Lookup(part)
	switch {
	case !known || hops == 0 || v.Settled:
		return false
	case v.Problem != (reconciler.Problem{}), len(c.ownSteps(part)) > 0:
		return true
	}
	for _, need := range v.Needs {
		if !c.leads(need, hops-1) {
			return false
		}
	}
	return len(v.Needs) > 0
}

// explained reports whether a part that is not settled is stuck, or waits for one that is.
func (c *planCase) explained(part state.Part, hops int) bool {
	v := c.plan.Verdicts.Of(part)
	if v.Problem != (reconciler.Problem{}) {
		return true
	}
	return hops > 0 && slices.ContainsFunc(v.Needs, func(need state.Part) bool { return c.explained(need, hops-1) })
}
