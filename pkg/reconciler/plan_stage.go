package reconciler

import (
	"cmp"
	"path"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// stage plans a stage: device, contents, mount.
func (p *planner) stage(s *state.Stage) Verdict {
	if s.Provisional {
		return p.provisional(s)
	}
	if err := p.have.Unfit[state.StagePart()]; err != nil {
		return stuckOn(err)
	}
	if v := p.inline(s); !v.Settled {
		return v
	}
	if p.unknownDevice() {
		return p.unseenDevice()
	}
	if p.have.Source != nil {
		return p.sourceStage(s)
	}
	if d := p.have.Device; len(p.have.Lower) == 0 && fsTypeUnchosen(s) && !d.Missing && d.Err == nil && (d.Formatted != "" && !d.Noted || d.CreatedFor != "") {
		return p.do(Choose, state.StagePart()) // before anything is done to the volume
	}
	if d := p.have.Device; d.State == state.DeviceAbsent && !d.Missing && s.Capability.Access == state.MountAccess && len(p.have.Stage.Mounts) == 0 {
		if v := p.stagingPath(s); !v.Settled { // before anything is done to the volume
			return v
		}
	}
	if v := p.preexistingMount(s); !v.Settled {
		return v
	}
	if v := p.device(s); !v.Settled {
		return v
	}
	if fsTypeUnchosen(s) { // what is there is known only now
		if err := p.have.Contents.Err; err != nil {
			return stuckOn(err)
		}
		if p.have.Contents.Unreadable {
			return unreadable(p.have.Device, p.have.Contents)
		}
		return p.do(Choose, state.StagePart())
	}
	if s.Capability.Access == state.BlockAccess {
		return p.raw(s)
	}
	if err := p.have.Stage.Err; err != nil {
		return stuckOn(err)
	}
	if p.broken() {
		return p.remountBroken(s)
	}
	if len(p.have.Stage.Mounts) > 0 {
		return p.keepMounted(s)
	}
	if v := p.contents(s); !v.Settled {
		return v
	}
	if v := p.stagingPath(s); !v.Settled {
		return v
	}
	return p.do(Mount, state.StagePart())
}

// fsTypeUnchosen reports whether the type of the stage's file system is not chosen yet.
func fsTypeUnchosen(s *state.Stage) bool {
	return s.Capability.Access == state.MountAccess && s.Capability.FSType == ""
}

// notBegun reports whether no step was made for a stage yet, so that whatever is
// mounted there was mounted before it was asked for.
func notBegun(s *state.Stage) bool { return !s.Gone && !s.Accepted && !s.Begun }

// preexistingMount judges the options of a file system that was mounted before the stage was
// asked for. What the plugin mounts itself always has the options of the record.
func (p *planner) preexistingMount(s *state.Stage) Verdict {
	if !notBegun(s) || s.Capability.Access != state.MountAccess {
		return settled
	}
	path, top := s.Path, state.Mount{}
	switch mounts := p.have.Stage.Mounts; {
	case len(mounts) > 0:
		top = mounts[0]
	case p.have.Elsewhere != nil: // such as at a target: a new mount would share its superblock
		path, top = p.have.Elsewhere.Path, p.have.Elsewhere.Mount
	default:
		return settled
	}
	if top.Node || top.Corrupt || !top.Is(p.have.Device.Number) || top.FSType != s.Capability.FSType {
		return settled // keepMounted judges that
	}
	flags, err := stageFlags(s)
	if err != nil {
		return stuckOn(err)
	}
	if option := flags.Shown(top.FSType, top.Options); option != "" {
		return stuck(state.FailedPrecondition, "the volume was found mounted at %s, by a request of which there is no record, and its file system is not seen to be mounted as asked: the mount flag %q makes the difference. A file system keeps its options as long as it is mounted: unpublish and unstage the volume, then stage it anew; or ask for the options that it has", path, option)
	}
	return settled
}

// stagingPath judges what is at the staging path of a volume that is not mounted there.
func (p *planner) stagingPath(s *state.Stage) Verdict {
	switch m := p.have.Stage; {
	case m.Err != nil:
		return stuckOn(m.Err)
	case m.InFile:
		return stuck(state.FailedPrecondition, "the staging path %s lies below a file, not a directory: move that away", s.Path)
	case m.File != state.NoFile && m.File != state.Directory:
		return stuck(state.FailedPrecondition, "the staging path %s is %s, not a directory", s.Path, m.File)
	case m.File == state.NoFile && s.Accepted && !callerNeedsStage(p.want):
		return stuck(state.FailedPrecondition, "the staging directory %s is not there any more; it is made again only when the volume is staged or published", s.Path)
	case m.File == state.Directory && !m.Empty:
		return stuck(state.FailedPrecondition, "the staging directory %s holds files that the mount would hide: move them away", s.Path)
	}
	return settled
}

// raw judges a device that is to be published raw.
func (p *planner) raw(s *state.Stage) Verdict {
	switch {
	case p.have.Stage.Err != nil:
		return stuckOn(p.have.Stage.Err)
	case p.stageIsOurs():
		return stuck(state.FailedPrecondition, "the volume's file system is mounted at the staging path %s, and raw block access was asked for: unpublish and unstage it first", s.Path)
	case p.have.Device.Formatting && p.have.Layer == "" && !s.ReadOnly && !s.Accepted:
		return stuck(state.FailedPrecondition, "formatting the volume was interrupted, so the next mount erases it: stage it once as a file system before it is used as a raw block device")
	}
	return settled
}

// device plans towards an attached stack, writable or read-only as the stage asks: the
// source, then layer by layer.
func (p *planner) device(s *state.Stage) Verdict {
	v := p.source(s)
	for i := 1; i <= len(p.have.Lower) && v.Settled; i++ {
		v = p.layer(s, i)
	}
	return v
}

// noSuchVolume is what is wrong with a volume that its backend does not have.
const noSuchVolume = "no such volume on this node, or its data is gone: name one that is here in the PersistentVolume (volumeHandle), or bring the data back; if the driver makes volumes, `csi-node volume list` shows those that are here"

// source plans towards the attached device of the backend.
func (p *planner) source(s *state.Stage) Verdict {
	d := p.stack[0].Device
	switch {
	case d.Err != nil:
		return stuckOn(d.Err)
	case d.Missing:
		return stuck(state.NotFound, noSuchVolume)
	case s.Identity != "" && d.Identity != "" && d.Identity != s.Identity:
		return stuck(state.FailedPrecondition, "the volume was staged from the device %s, and what is there now%s is the device %s: nothing is done to it. Bring the right one back; or, to take what is there, unpublish and unstage the volume and stage it again", s.Identity, nodeOf(d), d.Identity)
	case s.Identity != "" && d.Identity == "" && d.Attached():
		return stuck(state.Unavailable, "the volume was staged from the device %s, and the device %s does not tell now which one it is", s.Identity, d.Path)
	case d.State == state.DeviceForeign:
		return stuck(state.FailedPrecondition, "the volume's backing is used by %s, which the plugin did not attach: detach that first", d.Holder)
	case d.Attached() && d.Size < d.Capacity: // an interrupted expansion has not reached the device
		return p.do(GrowDevice, state.StagePart())
	case d.State == state.DeviceAbsent && d.Size < d.Capacity:
		return stuck(state.FailedPrecondition, "the volume has %d bytes, %d fewer than it was created with: its backing%s was truncated. Restore it from a backup, or delete the volume", d.Size, d.Capacity-d.Size, backing(d))
	case d.State != state.DeviceAttached && d.NeedsSecret:
		return p.waitsForSecret(0)
	case d.State != state.DeviceAttached:
		return p.do(Attach, state.StagePart())
	case d.ReadOnly == s.ReadOnly:
		return settled
	case p.highest() > 0 && !p.maybeInUse():
		return p.reopen(p.highest())
	case p.maybeInUse():
		return stuck(state.FailedPrecondition, "the device %s is attached %s and in use, so it cannot be attached %s", d.Path, state.FormatAccess(d.ReadOnly), state.FormatAccess(s.ReadOnly))
	case d.NeedsSecret:
		return p.waitsForSecret(0)
	}
	return p.do(Detach, state.StagePart())
}

// maybeInUse reports whether the top device is, or may be, in use, or has a view.
func (p *planner) maybeInUse() bool {
	return p.top().Held || p.have.View.State != state.DeviceAbsent || len(p.maybeBound()) > 0 || p.stageIsOurs() || unknown(p.have.Stage)
}

// mountedElsewhere reports whether the file system is mounted at a target, or where the
// record has none. Then the stage can be mounted without a check or a growth.
func (p *planner) mountedElsewhere() bool {
	return p.have.Elsewhere != nil || len(p.targets(func(_ *state.Target, m state.Mountpoint) bool {
		return isMountedAt(m, p.have.Device.Number)
	})) > 0
}

// inUse reports whether somebody has claimed the device or its view, or a target
// shows it. (A bound device node is no claim.)
func (p *planner) inUse() bool {
	return p.have.Device.Held || p.have.View.Held || len(p.bound()) > 0
}

// callerNeedsStage reports whether a caller waits for the stage, or for a target, which
// needs the stage.
func callerNeedsStage(want *state.Volume) bool {
	for _, t := range want.Targets {
		if t.CallerWaits && !t.Gone {
			return true
		}
	}
	return want.Stage.CallerWaits
}

// stageIsOurs reports whether the volume is mounted anywhere in the stack at the staging path.
func (p *planner) stageIsOurs() bool {
	return slices.ContainsFunc(p.have.Stage.Mounts, p.ours)
}

// keepMounted judges what is mounted at the staging path and plans to put it right.
func (p *planner) keepMounted(s *state.Stage) Verdict {
	mounts := p.have.Stage.Mounts
	top := mounts[0]
	flags, err := stageFlags(s)
	switch {
	case err != nil:
		return stuckOn(err)
	case top.Node || !top.Is(p.have.Device.Number):
		return stuck(state.FailedPrecondition, "%s is mounted at the staging path %s: it is not this volume's; find out whose before you unmount it", describe(top), s.Path)
	case len(mounts) > 1 && p.ours(mounts[1]):
		return p.do(Unmount, state.StagePart()) // it is mounted twice
	case top.Corrupt:
		return stuck(state.FailedPrecondition, "the file system at the staging path %s is broken, and lies over %s: that is not this volume's; find out whose before you unmount both", s.Path, describe(mounts[1]))
	case p.swapped(s):
		return p.dataSwapped(s)
	case top.FSType != s.Capability.FSType:
		return stuck(state.FailedPrecondition, "the volume is mounted at %s as %s, and %s was asked for", s.Path, top.FSType, s.Capability.FSType)
	case top.SuperReadOnly && !s.ReadOnly:
		return stuck(state.FailedPrecondition, "the file system at the staging path %s has turned read-only, which the kernel does after errors: see the kernel's log, then restart the pods that use the volume", s.Path)
	case !flags.Met(top.Attributes):
		return p.do(SetAttributes, state.StagePart())
	}
	return settled
}

// broken reports whether the volume's file system is mounted and does not work
// any more: it was shut down, or its device failed. All its mounts share one
// superblock; only after the last of them is gone can the data be mounted anew.
func (p *planner) broken() bool {
	if mounts := p.have.Stage.Mounts; len(mounts) > 0 {
		return p.corrupt(p.have.Stage)
	}
	return len(p.targets(func(_ *state.Target, m state.Mountpoint) bool { return p.corrupt(m) })) > 0
}

// corrupt reports whether only the volume's file system is mounted at a path, perhaps twice, and
// that is broken.
func (p *planner) corrupt(m state.Mountpoint) bool {
	other := func(m state.Mount) bool { return m.Node || !m.Is(p.have.Device.Number) }
	return len(m.Mounts) > 0 && m.Mounts[0].Corrupt && !slices.ContainsFunc(m.Mounts, other)
}

// remountBroken plans to mount a broken file system anew. Its mounts are taken down only if
// nothing else keeps it and the data can be read: a target that fails is better than
// one that shows an empty directory.
func (p *planner) remountBroken(s *state.Stage) Verdict {
	c, bound := p.have.Contents, p.bound()
	broken := p.targets(func(_ *state.Target, m state.Mountpoint) bool { return p.corrupt(m) })
	switch {
	case c.Err != nil:
		return stuckOn(c.Err)
	case c.Unreadable:
		return unreadable(p.have.Device, c)
	case p.swapped(s):
		return p.dataSwapped(s)
	case p.have.Device.Formatting || c.Kind != state.ContentsFilesystem:
		return stuck(state.FailedPrecondition, "the file system at the staging path %s is broken, and its device %s holds none now: restore its backing%s from a backup", s.Path, p.have.Device.Path, backing(p.have.Device))
	case len(p.have.Keepers) > 0:
		return stuck(state.Unavailable, "the file system at the staging path %s is broken (it was shut down, or its device failed: see the kernel's log) and kept by %s: end that, then it is mounted anew", s.Path, strings.Join(p.have.Keepers, ", "))
	case len(broken) < len(p.maybeBound()):
		other := slices.DeleteFunc(p.maybeBound(), func(part state.Part) bool { return slices.Contains(broken, part) })
		return stuck(state.Unavailable, "the file system at the staging path %s is broken, and what is at %s is covered, not broken, or cannot be looked at: see what is mounted there (findmnt), and take away what is not this volume's", s.Path, other[0].Path)
	case len(bound) > 0 && !p.allowed(Unmount).Settled:
		return p.allowed(Unmount) // without it, unbinding would lead nowhere
	case len(bound) > 0:
		p.remounting = true
		return Verdict{Needs: bound}
	}
	return p.do(Unmount, state.StagePart())
}

// swapped reports whether the device holds another file system than when the stage
// was accepted, or than was made on it.
func (p *planner) swapped(s *state.Stage) bool {
	c := p.have.Contents
	was := cmp.Or(s.UUID, p.have.Device.MadeUUID)
	return c.Err == nil && was != "" && c.UUID != "" && c.UUID != was
}

// dataSwapped is the verdict on a device that was swapped.
func (p *planner) dataSwapped(s *state.Stage) Verdict {
	d := p.have.Device
	if s.UUID == "" {
		return stuck(state.FailedPrecondition, "the device %s holds the file system %s, and %s was made on the volume's: it is another volume's disk, and tells no identity by which that could be seen before. Name the right one by the path; or, to take what is there, give the PersistentVolume another volume handle", d.Path, p.have.Contents.UUID, d.MadeUUID)
	}
	return stuck(state.FailedPrecondition, "the device %s holds the file system %s, and the volume was staged with %s: its data was swapped. Put the right data back into its backing%s; or, to take what is there, unpublish and unstage the volume and stage it again", d.Path, p.have.Contents.UUID, s.UUID, backing(d))
}

// contents plans towards a device that can be mounted: formatted once, checked if
// the superblock asks for it, and grown if its file system grows only unmounted.
func (p *planner) contents(s *state.Stage) Verdict {
	d, c := p.have.Device, p.have.Contents
	switch {
	case c.Err != nil:
		return stuckOn(c.Err)
	case c.Unreadable && (!d.Formatting || d.StaleMark):
		return unreadable(d, c)
	case p.swapped(s):
		return p.dataSwapped(s)
	case s.UUID != "" && (d.Formatting || maybeBlank(c)):
		return stuck(state.FailedPrecondition, "the volume was staged with the file system %s, and is blank or to be formatted now: its data is lost, and it is not formatted again. Restore its backing%s from a backup; or, to have it formatted, unpublish and unstage the volume and stage it again", s.UUID, backing(d))
	case d.Raw && (d.Formatting || maybeBlank(c)):
		return stuck(state.FailedPrecondition, "the volume was published as a raw block device before, so it is not formatted, whatever it holds. Its backing%s is left as it is; to have it formatted, %s", backing(d), p.clearing())
	case d.Formatting:
		return p.finishFormat(s)
	case d.Proved && !maybeBlank(c):
		return turnedUp(d, c)
	}
	switch c.Kind {
	case state.ContentsFilesystem:
		switch {
		case c.FSType != s.Capability.FSType:
			return stuck(state.FailedPrecondition, "the volume holds a file system of type %s, and %s was asked for; a PersistentVolume without fsType takes what is there", c.FSType, s.Capability.FSType)
		case s.ReadOnly || !c.NeedsCheck && !(c.Growable && c.GrowsUnmounted && !c.GrowsMounted):
			return settled
		case p.mountedElsewhere():
			return settled // it is in use: too late for a check, and it grows with a later stage
		case p.inUse():
			return p.held(d, "checking or growing the file system")
		case c.NeedsCheck:
			return p.do(Check, state.StagePart())
		}
		return p.do(GrowFilesystem, state.StagePart())
	case state.ContentsBlank, state.ContentsUnproven:
		switch {
		case s.ReadOnly:
			return stuck(state.FailedPrecondition, "the volume is blank and read-only access was asked for: stage it once for writing, which formats it")
		case p.have.Layer != "":
			return stuck(state.FailedPrecondition, "the volume's layer %s is not new, and holds nothing known: its data is lost, and it is not formatted again. Restore it from a backup, or delete the volume", p.have.Layer)
		case d.Formatted != "":
			return stuck(state.FailedPrecondition, "the volume was formatted as %s before and is blank now: its data is lost, and it is not formatted again. Restore its backing%s from a backup, or delete the volume", d.Formatted, backing(d))
		case d.Size < p.have.Smallest:
			return p.tooSmall(s)
		case p.inUse():
			return p.held(d, "formatting")
		case d.Proved && d.Noted:
			return p.do(Format, state.StagePart())
		}
		return p.do(BeginFormat, state.StagePart())
	}
	return stuck(state.FailedPrecondition, "the volume is neither blank nor a file system that this node can mount: found %s. Its backing%s is left as it is; to destroy what is there deliberately, %s", c.Found, backing(d), p.clearing())
}

// finishFormat plans the format of a device that bears the formatting mark: it was
// never mounted.
func (p *planner) finishFormat(s *state.Stage) Verdict {
	d := p.have.Device
	switch {
	case s.ReadOnly:
		return stuck(state.FailedPrecondition, "formatting the volume was interrupted and read-only access was asked for: stage it once for writing")
	case d.Size < p.have.Smallest:
		return p.tooSmall(s)
	case p.inUse():
		return p.held(d, "formatting again")
	case d.StaleMark && !maybeBlank(p.have.Contents):
		return p.staleMark(p.have.Contents)
	case !maybeBlank(p.have.Contents) && !d.Noise:
		return p.eraseRemains(p.have.Layer, d, p.have.Contents)
	}
	return p.doOn(p.have.Layer, Format, state.StagePart())
}

// eraseRemains plans for the element of a layer, or the source, that bears the formatting mark
// and is not blank: it is erased if that can be what the format has left.
func (p *planner) eraseRemains(layer string, d state.Device, c state.Contents) Verdict {
	switch {
	case d.FormatUUID == "" || c.Origin == state.OriginFormat || c.Origin == state.OriginUnnamed:
		return p.doOn(layer, Erase, state.StagePart())
	case c.Origin == state.OriginOther:
		return p.do(AbandonFormat, state.StagePart())
	}
	return stuck(state.Unavailable, "a format of the volume was begun and has not ended, and whether what is on the device %s is what it left is not known: found %s", d.Path, c.Found)
}

// unreadable is the verdict on a device of which it is not known what it holds.
func unreadable(d state.Device, c state.Contents) Verdict {
	return stuck(state.Unavailable, "what is on the device %s is not known: found %s; see the kernel's log", d.Path, c.Found)
}

// turnedUpText says of the device at a path that something was found on it after all.
const turnedUpText = "the device %s was proved blank, and is not any more: found %s; it is left as it is"

// turnedUp is the verdict on a device that was proved blank and is not any more.
func turnedUp(d state.Device, c state.Contents) Verdict {
	return stuck(state.Unavailable, turnedUpText, d.Path, c.Found)
}

// staleMark is the verdict on a device that bears the formatting mark and holds something
// that others may have put there since.
func (p *planner) staleMark(c state.Contents) Verdict {
	return stuck(state.FailedPrecondition, "a format of the volume was begun on this node and has not ended; the node was rebooted or the disk unplugged since, and it holds what others may have put there: found %s. It is left as it is; to destroy that, %s; to keep it, remove the note of the format in --lib-dir", c.Found, p.clearing())
}

// clearing is how a person has what is on the volume destroyed.
func (p *planner) clearing() string {
	return "unstage the volume and run csi-node volume clear-device " + p.want.ID + " --i-understand-this-destroys-data"
}

// maybeBlank reports whether a device may be blank, as far as an observation can
// tell. That is proved before it is formatted.
func maybeBlank(c state.Contents) bool {
	return c.Kind == state.ContentsBlank || c.Kind == state.ContentsUnproven
}

// tooSmall is the verdict on a device that has no room for a file system of the type.
func (p *planner) tooSmall(s *state.Stage) Verdict {
	return stuck(state.FailedPrecondition, "the volume has %d bytes, and a file system of type %s needs at least %d: use a larger volume or another file system", p.have.Device.Size, s.Capability.FSType, p.have.Smallest)
}

// nodeOf returns the device node's path for an error text: " (/dev/loop3)", or nothing.
func nodeOf(d state.Device) string {
	if d.Path == "" {
		return ""
	}
	return " (" + d.Path + ")"
}

// backing returns the backing's name for an error text, with a space before it, or nothing.
func backing(d state.Device) string {
	if d.Backing == "" {
		return ""
	}
	return " " + d.Backing
}

// held is the verdict on a device that somebody else has claimed; before is what has
// to wait for that.
func (p *planner) held(d state.Device, before string) Verdict {
	if !d.Held && p.have.View.Held {
		d = p.have.View
	}
	return stuck(state.Unavailable, "the device %s is still held, which must end before %s: %s", d.Path, before, knownHolder(d))
}

// unstage plans the end of a stage: mount, view, device.
func (p *planner) unstage(s *state.Stage) Verdict {
	if bound := p.maybeBound(); len(bound) > 0 {
		return Verdict{Needs: bound}
	}
	mounts, view := p.have.Stage.Mounts, p.have.View
	switch {
	case p.have.Stage.Err != nil:
		return stuckOn(p.have.Stage.Err)
	case len(mounts) > 0 && p.ours(mounts[0]) && len(p.publishedUnrecorded()) > 0:
		if p.unknownDevice() {
			return p.unseenDevice()
		}
		return residue("the volume is still published at %s: NodeUnpublishVolume comes first", strings.Join(p.publishedUnrecorded(), ", "))
	case len(mounts) > 0 && p.ours(mounts[0]):
		return p.do(Unmount, state.StagePart())
	case p.stageIsOurs():
		return stuck(state.FailedPrecondition, "%s is mounted over the volume at the staging path %s: it is not this volume's; find out whose before you unmount it", describe(mounts[0]), s.Path)
	case view.State == state.DeviceDetaching, view.State == state.DeviceAttached && view.Held:
		return p.held(view, "it is detached")
	case view.State == state.DeviceAttached:
		return p.do(DetachView, state.StagePart())
	case p.unknownDevice():
		return p.unseenDevice()
	}
	switch d := p.top(); {
	case p.mountedForNext(s, d):
		return settled
	case len(mounts) == 0 && p.stagedUnrecorded():
		return settled
	case !presentOrStray(d) && len(mounts) > 0 && s.UUID != "": // it was mounted, and its storage may be known no more
		return stuck(state.FailedPrecondition, "%s is mounted at the staging path %s, and the volume's storage, of which it may be, is not found: give the plugin the storage that the volume was staged from; else find out whose the mount is before you unmount it", describe(mounts[0]), s.Path)
	case !presentOrStray(d) && len(mounts) > 0 && mayBeDisk(mounts[0]) && !s.Withdrawn: // what tells of the volume's device may be lost, too
		return residue("%s is mounted at the staging path %s, and is of no device of the volume that is known: find out whose before you unmount it", describe(mounts[0]), s.Path)
	case !presentOrStray(d):
		return settled
	case d.Held && p.have.Stage.File == state.Directory && p.have.Stage.Empty:
		return p.do(Release, state.StagePart())
	case d.Held || d.State == state.DeviceDetaching:
		return p.held(d, "it is detached")
	case p.highest() > 0:
		return p.close(p.highest())
	}
	return p.do(Detach, state.StagePart())
}

// mayBeDisk reports whether a mount shows a file system on a block device.
func mayBeDisk(m state.Mount) bool { return !m.Node && m.Device.Major != 0 }

// publishedUnrecorded returns where the volume may be published without a record. Kubelet
// stages at …/globalmount, and publishes elsewhere.
func (p *planner) publishedUnrecorded() []string {
	return slices.DeleteFunc(slices.Clone(p.have.Others), func(at string) bool { return path.Base(at) == "globalmount" })
}

// stagedUnrecorded reports whether the volume may be staged at another path without a
// record, so that an unstage there will detach the device. Kubelet stages outside pods/.
func (p *planner) stagedUnrecorded() bool {
	return slices.ContainsFunc(p.have.Others, func(at string) bool { return !strings.Contains(at, "/pods/") })
}

// mountedForNext reports whether the device is mounted already at the path of the next
// stage, whose record was lost. Then the device is kept for that stage.
func (p *planner) mountedForNext(s *state.Stage, d state.Device) bool {
	m := p.have.Next.Mounts
	return s.Next != nil && len(m) > 0 && p.ours(m[0]) && d.Attached()
}

// missingOverhead returns the overhead of the layers, in bytes, that is missing from a requested
// size. NodeExpandVolume adds it by the volume context, which an adopted stage may lack;
// then it is what the layers take of the source, else 0.
func missingOverhead(want *state.Volume, have *state.Actual) int64 {
	if s := want.Stage; s == nil || !s.Adopted || len(s.Context) > 0 || len(have.Lower) == 0 || have.Device.Capacity <= 0 {
		return 0
	}
	return have.Lower[0].Device.Size - have.Device.Capacity
}

// size plans the growth of a staged volume.
func (p *planner) size(z *state.Size) Verdict {
	s, d, c := p.want.Stage, p.stack[0].Device, p.have.Contents
	bytes, limit := z.Bytes, z.Limit
	if more := missingOverhead(p.want, p.have); !z.Accepted {
		bytes += more
		if limit > 0 {
			limit += more
		}
	}
	grown := state.RoundUp(bytes) // to what it grows
	if d.Unit > 0 {
		grown = (grown + d.Unit - 1) / d.Unit * d.Unit
	}
	switch {
	case s == nil || s.Gone:
		return stuck(state.FailedPrecondition, "the volume is not staged on this node")
	case s.Provisional:
		return Verdict{Needs: []state.Part{state.StagePart()}}
	case p.have.Source != nil:
		return stuck(state.FailedPrecondition, "the volume is mounted from %s and has no device on this node that could grow", p.have.Source.Source)
	case !z.Accepted && limit > 0 && max(d.Size, d.Capacity) > limit:
		return stuck(state.OutOfRange, "the volume has %d bytes already, more than the limit of %d, and never shrinks", max(d.Size, d.Capacity), limit)
	case d.Size < bytes && limit > 0 && grown > limit:
		return stuck(state.OutOfRange, "sizes are rounded up: the volume would have %d bytes, more than the limit of %d: ask for less, or allow as much", grown, limit)
	case !p.plan.Verdicts.Of(state.StagePart()).Settled:
		return Verdict{Needs: []state.Part{state.StagePart()}}
	case d.Size < bytes:
		return p.do(GrowDevice, state.SizePart())
	case p.viewLags():
		return Verdict{} // growView plans the step
	case s.Capability.Access == state.BlockAccess:
		return settled
	case c.Err != nil:
		return stuckOn(c.Err)
	case c.Unreadable && !z.Accepted:
		return unreadable(d, c)
	case c.Kind == state.ContentsOther && !z.Accepted:
		return stuck(state.FailedPrecondition, "the device has %d bytes, and what is on it is no file system that fills it: found %s", d.Size, c.Found)
	case !c.Growable:
		return settled
	case z.Accepted && (s.ReadOnly || !c.GrowsMounted):
		return settled // it was settled before a refused request made the device larger
	case s.ReadOnly:
		return stuck(state.FailedPrecondition, "the device has %d bytes now; the %s file system is mounted read-only and grows when the volume is next staged for writing", d.Size, c.FSType)
	case !c.GrowsMounted:
		return stuck(state.FailedPrecondition, "the device has %d bytes now; only a process with CAP_SYS_RESOURCE, which the plugin lacks, can grow a mounted %s file system: it grows when the volume is next staged", d.Size, c.FSType)
	}
	return Verdict{} // growMounted plans the step
}

// growMounted plans to let a mounted file system fill its device, whether asked or not.
func (p *planner) growMounted() {
	s, c := p.want.Stage, p.have.Contents
	if s == nil || s.Gone || s.ReadOnly || s.Capability.Access != state.MountAccess || !c.Growable || !c.GrowsMounted {
		return
	}
	if p.plan.Verdicts.Of(state.StagePart()).Settled {
		p.do(GrowFilesystem, state.SizePart())
	}
}

// stageFlags returns the flags of the stage mount.
func stageFlags(s *state.Stage) (state.Flags, error) {
	return mountFlags(s.Capability.Flags, s.ReadOnly)
}

// mountFlags parses mount flags of a request. A read-only mount is so whatever they say; any
// other is written to unless they say that it is not.
func mountFlags(words []string, readOnly bool) (state.Flags, error) {
	flags, err := state.ParseFlags(words)
	if readOnly {
		flags.Set |= state.ReadOnly
		flags.Clear &^= state.ReadOnly
	} else if flags.Set&state.ReadOnly == 0 {
		flags.Clear |= state.ReadOnly
	}
	return flags, err
}
