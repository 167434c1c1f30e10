package reconciler_test

import (
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// ---- Causes: what a part may be stuck on, and as what that is told. ----

// planCause is a reason for which a part may be stuck. Its class decides whether
// the caller tries again.
type planCause struct {
	class state.Class
	words string // in what is told
	when  func(c *planCase) bool
}

// causeOf returns the cause that a verdict tells, if it is one of the part's and
// there in this state.
func (c *planCase) causeOf(part state.Part, v reconciler.Verdict) *planCause {
	defer func() { c.target, c.place = nil, state.Mountpoint{} }()
	if part.Kind == state.TargetKind {
		c.target, c.place = c.want.Targets[part.Path], c.have.Targets.At(part.Path)
	} else {
		c.place = c.have.Stage
	}
	for _, causes := range c.causesFor(part, v.Settled) {
		for _, cause := range causes {
			if cause.class == v.Problem.Class && strings.Contains(v.Problem.Text, cause.words) && cause.when(c) {
				return cause
			}
		}
	}
	return nil
}

// causesFor returns the causes on which a part can be stuck.
func (c *planCase) causesFor(part state.Part, settled bool) [][]*planCause {
	switch {
	case settled && c.leftBehind(part):
		return [][]*planCause{residueCauses}
	case settled:
		return nil
	case part.Kind == state.SizeKind && c.stageWanted() && !c.wantsBlock() && !c.sourced() && c.contentsUnseen():
		return [][]*planCause{unreadCauses}
	case part.Kind == state.SizeKind:
		return [][]*planCause{sizeCauses}
	case part.Kind == state.TargetKind && !c.target.Gone && !c.stageWanted():
		return [][]*planCause{publishCauses}
	case part.Kind == state.TargetKind && notSeen(c.place):
		return [][]*planCause{placeCauses}
	case part.Kind == state.TargetKind && c.target.Gone:
		return [][]*planCause{unpublishCauses}
	case part.Kind == state.TargetKind:
		return [][]*planCause{publishCauses}
	case !c.stageWanted():
		return [][]*planCause{placeCauses, unstageCauses}
	case c.sourced():
		return [][]*planCause{unknownCauses, sourceCauses}
	}
	causes := [][]*planCause{unknownCauses, deviceCauses}
	if c.layered() {
		causes = append(causes, layerCauses)
	}
	if c.typeOpen() {
		causes = append(causes, unreadCauses)
	}
	switch {
	case notSeen(c.place):
		return append(causes, placeCauses)
	case c.wantsBlock():
		return append(causes, rawCauses)
	case c.have.Device.State == state.DeviceAbsent && len(c.place.Mounts) == 0:
		return append(causes, stagingCauses)
	case c.broken() && c.contentsUnseen():
		return append(causes, unreadCauses)
	case c.broken():
		return append(causes, brokenCauses)
	case len(c.place.Mounts) > 0:
		return append(causes, mountedCauses)
	case c.contentsUnseen():
		return append(causes, stagingCauses, unreadCauses)
	}
	return append(causes, stagingCauses, contentsCauses)
}

// planCauses are all of them. Each is met in some state.
var planCauses = [][]*planCause{
	unknownCauses, deviceCauses, layerCauses, sourceCauses, placeCauses, rawCauses, mountedCauses, stagingCauses, unreadCauses, brokenCauses, contentsCauses,
	unstageCauses, sizeCauses, publishCauses, unpublishCauses, residueCauses,
}

const notLookedAt = "it was not looked at"

var (
	unknownCauses = []*planCause{
		{state.Unavailable, "not known now", (*planCase).unknown},
		{state.Unavailable, "unread", func(c *planCase) bool { return c.source().Err != nil }},
	}
	placeCauses = []*planCause{
		{state.Unavailable, errPlanNow.Error(), func(c *planCase) bool { return c.place.Err == errPlanNow }},
		{state.InvalidArgument, "a symbolic link", func(c *planCase) bool { return c.place.Err == errPlanPath }},
		{state.Unavailable, notLookedAt, func(c *planCase) bool { return c.place.Err == nil && c.place.File == state.UnknownFile }},
	}
	sourceCauses = []*planCause{
		{state.NotFound, "no such volume", func(c *planCase) bool { return c.have.Device.Missing }},
		{state.InvalidArgument, "no block device", (*planCase).wantsBlock},
		{state.InvalidArgument, "mounted as nfs4, and ext4 was asked for", func(c *planCase) bool { return c.want.Stage.Capability.FSType == "ext4" }},
	}

	// What the backend's device is stuck on.
	deviceCauses = []*planCause{
		{state.NotFound, "no such volume", func(c *planCase) bool { return c.source().Missing }},
		{state.FailedPrecondition, "staged from the device its, and what is there now", func(c *planCase) bool { return c.stranger() && c.source().Identity != "" }},
		{state.Unavailable, "does not tell now which one it is", func(c *planCase) bool { return c.stranger() && c.source().Identity == "" }},
		{state.FailedPrecondition, "used by somebody, which the plugin did not attach", func(c *planCase) bool { return c.source().State == state.DeviceForeign }},
		{state.FailedPrecondition, "was truncated", func(c *planCase) bool {
			return c.source().State == state.DeviceAbsent && c.source().Size < c.source().Capacity
		}},
		{state.FailedPrecondition, "so it cannot be attached", func(c *planCase) bool { return c.otherMode(c.source()) && c.maybeInUse() }},
		{state.Unavailable, "the volume waits for its secret", func(c *planCase) bool {
			return c.source().NeedsSecret && (c.source().State != state.DeviceAttached || c.otherMode(c.source()))
		}},
		{state.Unavailable, "only when somebody asks", func(c *planCase) bool {
			m := c.have.Stage.Mounts
			twice := len(m) > 1 && c.shows(m[0]) && c.shows(m[1]) && c.deviceAsAsked() && !c.broken()
			return c.source().Shared && !c.asked() && !twice
		}},
		{state.FailedPrecondition, "it is not formatted. Use an access mode", func(c *planCase) bool {
			return c.source().Shared && !c.source().Exclusive && (c.source().Formatting || c.have.Device.Unmade || c.toFormat())
		}},
	}

	// What its layer is stuck on.
	layerCauses = []*planCause{
		{state.Unavailable, "waits for its secret", func(c *planCase) bool {
			d, source := c.have.Device, c.source()
			return d.NeedsSecret && (d.State != state.DeviceAttached || d.Size < d.Capacity || c.otherMode(d) || c.otherMode(source) || source.Formatting)
		}},
		{state.Unavailable, "not the volume's any more, and is in use", func(c *planCase) bool { return c.have.Device.Stray && c.maybeInUse() }},
		{state.FailedPrecondition, "which the plugin did not open", func(c *planCase) bool {
			return c.have.Device.State == state.DeviceForeign && !c.have.Device.Stray
		}},
		{state.FailedPrecondition, "does not bear it any more", func(c *planCase) bool { return c.have.Device.Unmade && c.open() }},
		{state.Unavailable, errPlanNow.Error(), func(c *planCase) bool { return c.have.Device.Unmade && c.have.Beneath.Err != nil }},
		{state.Unavailable, notLookedAt, func(c *planCase) bool {
			return c.have.Device.Unmade && c.have.Beneath.Kind == state.ContentsUnread
		}},
		{state.FailedPrecondition, "its data is lost, and it is not made again", func(c *planCase) bool {
			return c.have.Device.Unmade && (c.source().Formatted != "" || c.remembers())
		}},
		{state.FailedPrecondition, "no layer L is made on it", func(c *planCase) bool { return c.have.Device.Unmade && c.source().Raw }},
		{state.FailedPrecondition, "has no layer L yet, and read-only access", func(c *planCase) bool { return c.have.Device.Unmade && c.want.Stage.ReadOnly }},
		{state.Unavailable, "still held, which must end before its layer L is made", func(c *planCase) bool { return c.have.Device.Unmade && c.source().Held }},
		{state.FailedPrecondition, "holds what others may have put there", func(c *planCase) bool {
			return c.have.Device.Unmade && c.source().StaleMark && !blankKind(c.have.Beneath.Kind)
		}},
		{state.Unavailable, "was proved blank, and is not any more", func(c *planCase) bool {
			return c.have.Device.Unmade && c.source().Proved && !blankKind(c.have.Beneath.Kind)
		}},
		{state.Unavailable, "is what it left is not known", func(c *planCase) bool {
			return c.source().FormatUUID != "" && !blankKind(c.have.Beneath.Kind) && c.have.Beneath.Origin == state.OriginUnknown
		}},
		{state.FailedPrecondition, "neither blank nor bears the layer L", func(c *planCase) bool {
			return c.have.Device.Unmade && !c.source().Formatting && !blankKind(c.have.Beneath.Kind)
		}},
		{state.FailedPrecondition, "was interrupted and read-only access", func(c *planCase) bool {
			return c.source().Formatting && c.have.Device.Fresh && c.want.Stage.ReadOnly
		}},
		{state.FailedPrecondition, "in use, or not new", func(c *planCase) bool {
			return c.source().Formatting && !c.have.Device.Unmade && (!c.have.Device.Fresh || c.open() && c.maybeInUse())
		}},
		{state.FailedPrecondition, "so it cannot be opened", func(c *planCase) bool { return c.otherMode(c.have.Device) && c.maybeInUse() }},
	}

	// What a stage is stuck on when its device stands.
	rawCauses = []*planCause{
		{state.FailedPrecondition, "file system is mounted at the staging path", func(c *planCase) bool { return slices.ContainsFunc(c.have.Stage.Mounts, c.shows) }},
		{state.FailedPrecondition, "so the next mount erases it", (*planCase).rawCause},
	}
	mountedCauses = []*planCause{
		{state.FailedPrecondition, "it is not this volume's", func(c *planCase) bool { return !wholeOf(c.have.Stage.Mounts[0], c.have.Device.Number) }},
		{state.FailedPrecondition, "is broken, and lies over tmpfs", func(c *planCase) bool {
			m := c.have.Stage.Mounts
			return m[0].Corrupt && len(m) > 1 && !c.shows(m[1])
		}},
		{state.FailedPrecondition, "its data was swapped", (*planCase).swapped},
		{state.FailedPrecondition, "as xfs, and ext4 was asked for", func(c *planCase) bool { return c.have.Stage.Mounts[0].FSType == "xfs" }},
		{state.FailedPrecondition, "has turned read-only", func(c *planCase) bool { return c.have.Stage.Mounts[0].SuperReadOnly && !c.want.Stage.ReadOnly }},
	}
	unreadCauses = []*planCause{
		{state.Unavailable, errPlanNow.Error(), func(c *planCase) bool { return c.have.Contents.Err != nil }},
		{state.Unavailable, notLookedAt, func(c *planCase) bool { return c.contentsUnseen() && c.have.Contents.Err == nil }},
	}
	brokenCauses = []*planCause{
		{state.FailedPrecondition, "its data was swapped", (*planCase).swapped},
		{state.FailedPrecondition, "holds none now", func(c *planCase) bool {
			return c.have.Device.Formatting || c.have.Contents.Kind != state.ContentsFilesystem
		}},
		{state.Unavailable, "kept by somebody", func(c *planCase) bool { return len(c.have.Keepers) > 0 }},
		{state.Unavailable, "is covered, not broken, or cannot be looked at", (*planCase).brokenElsewhere},
	}
	stagingCauses = []*planCause{
		{state.FailedPrecondition, "below a file, not a directory", func(c *planCase) bool { return c.place.InFile }},
		{state.FailedPrecondition, ", not a directory", func(c *planCase) bool { return c.place.File != state.NoFile && c.place.File != state.Directory }},
		{state.FailedPrecondition, "holds files that the mount would hide", func(c *planCase) bool { return c.place.File == state.Directory && !c.place.Empty }},
		{state.FailedPrecondition, "made again only when the volume is staged or published", func(c *planCase) bool {
			return c.place.File == state.NoFile && c.want.Stage.Accepted && !c.asked()
		}},
	}
	contentsCauses = []*planCause{
		{state.FailedPrecondition, "its data was swapped", (*planCase).swapped},
		{state.FailedPrecondition, "its data is lost, and it is not formatted again", func(c *planCase) bool { return c.toFormat() && c.remembers() }},
		{state.FailedPrecondition, "published as a raw block device before", func(c *planCase) bool { return c.toFormat() && c.have.Device.Raw }},
		{state.FailedPrecondition, "was interrupted and read-only access", func(c *planCase) bool { return c.have.Device.Formatting && c.want.Stage.ReadOnly }},
		{state.FailedPrecondition, "is blank and read-only access", func(c *planCase) bool { return c.maybeBlank() && c.want.Stage.ReadOnly }},
		{state.FailedPrecondition, "layer L is not new", func(c *planCase) bool { return c.layered() && c.maybeBlank() && !c.have.Device.Fresh }},
		{state.FailedPrecondition, "was formatted as ext4 before", func(c *planCase) bool {
			return c.maybeBlank() && !c.have.Device.Formatting && c.have.Device.Formatted != ""
		}},
		{state.FailedPrecondition, "needs at least 1000", func(c *planCase) bool { return c.toFormat() && c.have.Device.Size < c.have.Smallest }},
		{state.Unavailable, "still held, which must end before formatting", func(c *planCase) bool { return c.toFormat() && c.claimed() }},
		{state.FailedPrecondition, "holds what others may have put there", func(c *planCase) bool { return c.have.Device.StaleMark && !c.maybeBlank() }},
		{state.Unavailable, "was proved blank, and is not any more", func(c *planCase) bool { return c.have.Device.Proved && !c.maybeBlank() }},
		{state.Unavailable, "is what it left is not known", func(c *planCase) bool {
			return c.have.Device.FormatUUID != "" && !c.maybeBlank() && c.have.Contents.Origin == state.OriginUnknown
		}},
		{state.FailedPrecondition, "of type xfs, and ext4 was asked for", func(c *planCase) bool { return c.have.Contents.FSType == "xfs" }},
		{state.FailedPrecondition, "neither blank nor a file system that this node can mount: found something", func(c *planCase) bool { return c.have.Contents.Kind == state.ContentsOther }},
		{state.Unavailable, "still held, which must end before checking or growing", func(c *planCase) bool {
			f := c.have.Contents
			return c.claimed() && !c.want.Stage.ReadOnly && (f.NeedsCheck || f.Growable && f.GrowsUnmounted)
		}},
	}

	// What the others are stuck on.
	unstageCauses = []*planCause{
		{state.Unavailable, "not known now", (*planCase).unknown},
		{state.Unavailable, "unread", func(c *planCase) bool { return c.unknown() && c.have.Device.Err != nil }},
		{state.FailedPrecondition, "mounted over the volume at the staging path", func(c *planCase) bool {
			m := c.have.Stage.Mounts
			return len(m) > 1 && !c.shows(m[0]) && c.shows(m[1])
		}},
		{state.FailedPrecondition, "of which it may be, is not found", (*planCase).mountedByOther},
		{state.Unavailable, "still held, which must end before it is detached", func(c *planCase) bool {
			d, v := c.highest(), c.have.View
			return v.State == state.DeviceDetaching || v.Held || d.State == state.DeviceDetaching || d.Held
		}},
	}
	sizeCauses = []*planCause{
		{state.FailedPrecondition, "not staged on this node", func(c *planCase) bool { return !c.stageWanted() }},
		{state.FailedPrecondition, "no device on this node", (*planCase).sourced},
		{state.FailedPrecondition, "mounted read-only and grows when", func(c *planCase) bool { return c.have.Contents.Growable && c.want.Stage.ReadOnly }},
		{state.FailedPrecondition, "no file system that fills it: found something", func(c *planCase) bool { return c.have.Contents.Kind == state.ContentsOther && !c.want.Size.Accepted }},
		{state.FailedPrecondition, "CAP_SYS_RESOURCE", func(c *planCase) bool { return c.have.Contents.Growable && !c.have.Contents.GrowsMounted }},
	}
	publishCauses = []*planCause{
		{state.FailedPrecondition, "not staged on this node", func(c *planCase) bool { return !c.stageWanted() }},
		{state.FailedPrecondition, "restart the pod", func(c *planCase) bool { return c.numberChanged(c.target) }},
		{state.FailedPrecondition, "it is not this volume's", func(c *planCase) bool {
			return len(c.place.Mounts) > 0 && (!c.showsAt(c.target, c.place.Mounts[0]) || !c.rightKind(c.target, c.place.Mounts[0]))
		}},
		{state.FailedPrecondition, "made again only when the volume is published there again", func(c *planCase) bool {
			return c.place.File == state.NoFile && c.target.Accepted && !c.target.CallerWaits
		}},
		{state.FailedPrecondition, "below a file, not a directory", func(c *planCase) bool { return c.place.InFile }},
		{state.FailedPrecondition, ", not a ", func(c *planCase) bool { return c.place.File != state.NoFile && c.place.File != fileFor(c.target) }},
		{state.FailedPrecondition, "holds data that the volume would hide", func(c *planCase) bool { return c.place.File == fileFor(c.target) && !c.place.Empty }},
	}
	unpublishCauses = []*planCause{
		{state.Unavailable, "not known now", (*planCase).unknown},
		{state.Unavailable, "unread", func(c *planCase) bool { return c.unknown() && c.have.Device.Err != nil }},
		{state.FailedPrecondition, "is mounted over the volume", func(c *planCase) bool {
			return len(c.place.Mounts) > 0 && !c.showsAt(c.target, c.place.Mounts[0])
		}},
	}

	// What an end leaves, which is told when it is over.
	residueCauses = []*planCause{
		{state.FailedPrecondition, "still published at", func(c *planCase) bool { return c.target == nil }},
		{state.FailedPrecondition, "of no device of the volume that is known", func(c *planCase) bool { return c.target == nil && c.takenDown() && c.mountedByUnknown() }},
		{state.FailedPrecondition, "it is not this volume's", func(c *planCase) bool { return len(c.place.Mounts) > 0 }},
		{state.FailedPrecondition, "holds files: move them away", func(c *planCase) bool { return c.place.File == state.Directory && !c.place.Empty }},
		{state.FailedPrecondition, "the plugin did not make", func(c *planCase) bool { return c.place.File != state.Directory }},
	}
)

// toFormat reports whether nothing that is known is on a device, or its mark says so.
func (c *planCase) toFormat() bool { return c.have.Device.Formatting || c.maybeBlank() }

// claimed reports whether somebody uses the device.
func (c *planCase) claimed() bool {
	return c.have.Device.Held || c.have.View.Held || c.someTargetBound()
}

// maybeInUse reports whether the highest device that stands is, or may be, in use.
func (c *planCase) maybeInUse() bool {
	return c.highest().Held || c.have.View.State != state.DeviceAbsent || c.somewhere(c.showsAt) || c.someTargetUnseen() || unseen(c.have.Stage)
}

// otherMode reports whether a device stands that takes writes and should not, or the reverse.
func (c *planCase) otherMode(d state.Device) bool {
	return d.State == state.DeviceAttached && d.ReadOnly != c.want.Stage.ReadOnly
}
