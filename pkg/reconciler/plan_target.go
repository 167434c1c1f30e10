package reconciler

import (
	"slices"

	"github.com/csi-node/csi-node/pkg/state"
)

// unpublish plans the end of a publish. Only the volume's own mounts are
// unmounted, and only what is empty is removed.
func (p *planner) unpublish(t *state.Target) Verdict {
	part, m := state.TargetPart(t.Path), p.have.Targets.At(t.Path)
	unfit := p.have.Unfit[part]
	covered := slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return p.oursAt(t, m) })
	switch {
	case m.Err != nil && t.Withdrawn && state.ClassOf(m.Err).Final():
		return settled // nothing can have been mounted at such a path
	case m.Err != nil:
		return stuckOn(m.Err)
	case covered && p.oursAt(t, m.Mounts[0]):
		return p.do(Unbind, part)
	case covered:
		return stuck(state.FailedPrecondition, "%s is mounted over the volume at %s: it is not this volume's; find out whose before you unmount it", describe(m.Mounts[0]), t.Path)
	case len(m.Mounts) > 0 && p.unknownDevice():
		return p.unseenDevice() // it may be the volume's
	case t.Withdrawn || m.File == state.NoFile:
		return settled // an undo removes nothing but mounts
	case len(m.Mounts) > 0:
		return residue("%s is mounted at %s: it is not this volume's; find out whose before you unmount it", describe(m.Mounts[0]), t.Path)
	case unfit != nil && !state.ClassOf(unfit).Final():
		return stuckOn(unfit)
	case unfit != nil:
		return settled // it is part of a volume's data
	case m.Empty && (m.File == state.Directory || m.File == state.RegularFile):
		return p.do(RemoveTarget, part)
	case m.File == state.Directory:
		return residue("the volume is not mounted at %s, but the directory holds files: move them away, they are not removed", t.Path)
	}
	return residue("%s is %s that the plugin did not make: it is not removed", t.Path, m.File)
}

// publish plans a publish: a target that shows the stage, or the device.
func (p *planner) publish(t *state.Target) Verdict {
	s, m := p.want.Stage, p.have.Targets.At(t.Path)
	switch {
	case s == nil || s.Gone:
		return stuck(state.FailedPrecondition, "the volume is not staged on this node")
	case m.Err != nil:
		return stuckOn(m.Err)
	case p.have.Unfit[state.TargetPart(t.Path)] != nil:
		return stuckOn(p.have.Unfit[state.TargetPart(t.Path)])
	case !p.checkAdopted(t).Settled:
		return p.checkAdopted(t)
	case p.remounting && p.corrupt(m):
		return p.do(Unbind, state.TargetPart(t.Path))
	case !p.plan.Verdicts.Of(state.StagePart()).Settled:
		return Verdict{Needs: []state.Part{state.StagePart()}}
	case t.Capability.Access != s.Capability.Access: // the stage that it was asked for was withdrawn
		return stuck(state.FailedPrecondition, "the volume is staged as %s, not as %s", s.Capability, t.Capability)
	case t.Capability.Access == state.BlockAccess:
		return p.publishDevice(t)
	}
	flags, err := targetFlags(s, t)
	switch {
	case err != nil:
		return stuckOn(err)
	case len(m.Mounts) == 0:
		return p.bind(t, state.Directory)
	case p.have.Source != nil && !p.isFilesystem(m.Mounts[0]) && t.From.Is(m.Mounts[0]) && !t.Accepted:
		return p.do(Unbind, state.TargetPart(t.Path)) // no pod has it yet
	case p.have.Source != nil && !p.isFilesystem(m.Mounts[0]) && t.From.Is(m.Mounts[0]):
		return stuck(state.FailedPrecondition, "the volume was mounted from %s at %s, and is mounted from %s now, as after a start with other flags: restart the pod", t.From.Source, t.Path, p.have.Source.Source)
	case m.Mounts[0].Node || !p.isFilesystem(m.Mounts[0]):
		return p.foreign(t)
	case m.Mounts[0].Corrupt && p.have.Source != nil && !m.Mounts[0].Lost:
		return stuck(state.Unavailable, "what is mounted at %s does not work now, perhaps because its server is away: it is left as it is, and works again with it. If that is gone for good, end the pod, which takes the mount down", t.Path)
	case m.Mounts[0].Corrupt:
		return p.do(Unbind, state.TargetPart(t.Path))
	case len(m.Mounts) > 1 && p.isFilesystem(m.Mounts[1]):
		return p.do(Unbind, state.TargetPart(t.Path)) // bound twice
	case !flags.Met(m.Mounts[0].Attributes):
		return p.do(SetAttributes, state.TargetPart(t.Path))
	}
	return settled
}

// publishDevice binds the node of the device, or for a read-only target of a
// writable device that of its view: a read-only bind of a device node does not
// stop writes.
func (p *planner) publishDevice(t *state.Target) Verdict {
	part, m, d := state.TargetPart(t.Path), p.have.Targets.At(t.Path), p.have.Device
	if needsView(t, d) {
		if d = p.have.View; d.State != state.DeviceAttached {
			return p.do(AttachView, part)
		}
	}
	switch {
	case t.Accepted && t.Device != state.DeviceNumber{} && t.Device != d.Number:
		return stuck(state.FailedPrecondition, "the volume was published at %s as device %s and is device %s now; a pod keeps the number it was started with: restart the pod", t.Path, t.Device, d.Number)
	case len(m.Mounts) == 0:
		return p.bind(t, state.RegularFile)
	case !m.Mounts[0].Node || !p.oursAt(t, m.Mounts[0]):
		return p.foreign(t)
	case !m.Mounts[0].Is(d.Number), len(m.Mounts) > 1 && p.oursAt(t, m.Mounts[1]):
		return p.do(Unbind, part) // it is the view's node instead of the device's or vice versa, or bound twice
	case p.writesUnmarked(t):
		return p.do(MarkRaw, part) // a version that set no mark has bound it
	}
	return settled
}

// writesUnmarked reports whether a target lets a pod write to a raw device that does
// not bear the mark for that.
func (p *planner) writesUnmarked(t *state.Target) bool {
	d := p.have.Device
	return t.Capability.Access == state.BlockAccess && !t.ReadOnly && !d.ReadOnly && !d.Raw
}

// needsView reports whether a target shows the read-only view of the device, which takes no
// commands. A pod that has a read-only device itself keeps it.
func needsView(t *state.Target, d state.Device) bool {
	switch {
	case t.Capability.Access != state.BlockAccess:
		return false
	case d.ReadOnly:
		return d.Commands && (!t.Accepted || t.Device != d.Number)
	}
	return t.ReadOnly
}

// bind plans a bind onto a target at which nothing is mounted. A repair does not make
// a missing target again, because kubelet removes the directories of dead pods.
func (p *planner) bind(t *state.Target, want state.FileType) Verdict {
	switch m := p.have.Targets.At(t.Path); {
	case m.File == state.NoFile && t.Accepted && !t.CallerWaits:
		return stuck(state.FailedPrecondition, "the target %s is not there any more; it is made again only when the volume is published there again", t.Path)
	case m.InFile:
		return stuck(state.FailedPrecondition, "the target %s lies below a file, not a directory: move that away", t.Path)
	case m.File != state.NoFile && m.File != want:
		return stuck(state.FailedPrecondition, "the target %s is %s, not %s", t.Path, m.File, want)
	case m.File != state.NoFile && !m.Empty:
		return stuck(state.FailedPrecondition, "the target %s holds data that the volume would hide: move it away", t.Path)
	}
	if p.writesUnmarked(t) {
		return p.do(MarkRaw, state.TargetPart(t.Path)) // before anybody can write
	}
	if p.have.Source != nil {
		return p.do(MountSource, state.TargetPart(t.Path))
	}
	return p.do(Bind, state.TargetPart(t.Path))
}

// isFilesystem reports whether a mount is of the volume's own file system.
func (p *planner) isFilesystem(m state.Mount) bool {
	return m.Is(p.have.Device.Number) || p.have.Source.Is(m)
}

func (p *planner) foreign(t *state.Target) Verdict {
	return stuck(state.FailedPrecondition, "%s is mounted at %s: it is not this volume's; find out whose before you unmount it", describe(p.have.Targets.At(t.Path).Mounts[0]), t.Path)
}

// dropIdleView detaches the view of a staged volume once no target shows it.
func (p *planner) dropIdleView() {
	s := p.want.Stage
	if s == nil || s.Gone || s.Provisional || p.have.View.State != state.DeviceAttached || p.have.View.Held {
		return
	}
	for path, t := range p.want.Targets {
		m := p.have.Targets.At(path)
		shown := unknown(m) || slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return m.Is(p.have.View.Number) })
		if shown || !t.Gone && needsView(t, p.have.Device) {
			return
		}
	}
	p.do(DetachView, state.StagePart())
}

// growView plans to let a view that a target shows fill its device, whether asked or
// not: an administrator may have made a disk larger, and the kernel have noticed.
func (p *planner) growView() {
	s := p.want.Stage
	if s == nil || s.Gone || !p.plan.Verdicts.Of(state.StagePart()).Settled || !p.viewLags() {
		return
	}
	p.do(AttachView, state.SizePart())
}

// viewLags reports whether a target needs the view and it is smaller than its device.
func (p *planner) viewLags() bool {
	v, d := p.have.View, p.have.Device
	if v.State != state.DeviceAttached || v.Size == 0 || v.Size >= d.Size {
		return false
	}
	for _, t := range p.want.Targets {
		if !t.Gone && needsView(t, d) {
			return true
		}
	}
	return false
}

// targetFlags returns the flags of a bind: those of the stage, those of the
// target, and its read-only setting.
func targetFlags(s *state.Stage, t *state.Target) (state.Flags, error) {
	return mountFlags(append(slices.Clone(s.Capability.Flags), t.Capability.Flags...), s.ReadOnly || t.ReadOnly)
}
