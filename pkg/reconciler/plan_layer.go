package reconciler

import "github.com/csi-node/csi-node/pkg/state"

// highest returns the index of the highest element that has a device; 0, which is the
// source, when no layer has one.
func highest(stack []state.Element) int {
	for i := len(stack) - 1; i > 0; i-- {
		if presentOrStray(stack[i].Device) {
			return i
		}
	}
	return 0
}

func (p *planner) highest() int { return highest(p.stack) }

// top returns the device of the highest element that has one; else the source.
func (p *planner) top() state.Device { return p.stack[p.highest()].Device }

// presentOrStray reports whether there is a device that the plugin made, even if it
// is on another element than the volume's.
func presentOrStray(d state.Device) bool { return d.Present() || d.Stray }

func (p *planner) close(i int) Verdict {
	return p.doOn(p.stack[i].Layer, CloseLayer, state.StagePart())
}

// reopen plans to close element i so that it can be opened again.
func (p *planner) reopen(i int) Verdict {
	if p.stack[i].Device.NeedsSecret { // then it could not be
		return p.waitsForSecret(i)
	}
	return p.close(i)
}

// waitsForSecret is the verdict on element i, for which a secret is needed.
func (p *planner) waitsForSecret(i int) Verdict {
	what := "the volume"
	if name := p.stack[i].Layer; name != "" {
		what = "the volume's layer " + name
	}
	return stuck(state.Unavailable, "%s waits for its secret, which nobody has named since the plugin started, or which is not the right one: a stage or a publish brings it, if the StorageClass or the PersistentVolume names it (%snode-stage-secret-name and -namespace, and the same for node-publish)", what, state.KubernetesPrefix)
}

// layer plans towards the device of layer i, on the attached element beneath.
func (p *planner) layer(s *state.Stage, i int) Verdict {
	d, lower, name := p.stack[i].Device, p.stack[i-1].Device, p.stack[i].Layer
	switch {
	case d.Err != nil:
		return stuckOn(d.Err)
	case d.Stray && (p.maybeInUse() || p.highest() > i):
		return stuck(state.Unavailable, "the volume's layer %s (%s) stands on a device that is not the volume's any more, and is in use: unpublish and unstage the volume", name, d.Path)
	case d.Stray && d.Held:
		return p.held(d, "it is closed")
	case d.Stray:
		return p.close(i)
	case d.State == state.DeviceForeign:
		return stuck(state.FailedPrecondition, "the volume's layer %s is used by %s, which the plugin did not open: close that first", name, d.Holder)
	case d.NeedsSecret && (d.State != state.DeviceAttached || d.Size < d.Capacity && !d.GrowsOpen):
		return p.waitsForSecret(i)
	case d.Unmade && d.Present():
		return stuck(state.FailedPrecondition, "the volume's layer %s is open (%s), and the device beneath%s does not bear it any more: its data was swapped or destroyed. Put the right data back; or, to take what is there, unpublish and unstage the volume and stage it again", name, d.Path, nodeOf(lower))
	case d.Unmade:
		return p.create(s, i)
	case lower.Formatting && d.Fresh && s.ReadOnly:
		return stuck(state.FailedPrecondition, "making the volume's layer %s was interrupted and read-only access was asked for: stage it once for writing", name)
	case lower.Formatting && d.Fresh && !d.Present(): // the layer was made, but the mark beneath not yet cleared
		return p.doOn(name, CreateLayer, state.StagePart())
	case lower.Formatting && d.Fresh && !p.maybeInUse():
		return p.reopen(p.highest())
	case lower.Formatting && lower.FormatUUID != "" && !d.Present() && !lower.StaleMark: // a layer of the format would be new
		return p.do(AbandonFormat, state.StagePart())
	case lower.Formatting:
		return stuck(state.FailedPrecondition, "the volume bears the mark of an interrupted format, and a layer %s that is in use, or not new: it is left as it is", name)
	case d.State != state.DeviceAttached:
		return p.doOn(name, OpenLayer, state.StagePart())
	case d.ReadOnly != s.ReadOnly && p.maybeInUse():
		return stuck(state.FailedPrecondition, "the device %s is open %s and in use, so it cannot be opened %s", d.Path, state.FormatAccess(d.ReadOnly), state.FormatAccess(s.ReadOnly))
	case d.ReadOnly != s.ReadOnly:
		return p.reopen(p.highest())
	case d.Size < d.Capacity:
		return p.doOn(name, GrowLayer, state.StagePart())
	}
	return settled
}

// create plans towards layer i on an element that does not bear it. An element that
// bears the formatting mark was proved blank.
func (p *planner) create(s *state.Stage, i int) Verdict {
	c, source, lower, name := p.have.Beneath, p.stack[0].Device, p.stack[i-1].Device, p.stack[i].Layer
	switch {
	case c.Err != nil:
		return stuckOn(c.Err)
	case c.Kind == state.ContentsUnread:
		return stuckOn(errUnseen)
	case i == 1 && lower.Formatted != "" && lower.Formatted != name:
		return stuck(state.FailedPrecondition, "the volume was formatted as %s before, without the layer %s, and does not get it by its attributes: leave that out of the volume context (volumeAttributes of the PersistentVolume) to have its data as it is", lower.Formatted, name)
	case s.UUID != "" || i == 1 && lower.Formatted != "":
		return stuck(state.FailedPrecondition, "the volume had the layer %s before, and does not have it now: its data is lost, and it is not made again. Restore its backing%s from a backup, or delete the volume", name, backing(source))
	case source.Raw:
		return stuck(state.FailedPrecondition, "the volume was published as a raw block device before, so no layer %s is made on it, whatever it holds", name)
	case s.ReadOnly:
		return stuck(state.FailedPrecondition, "the volume has no layer %s yet, and read-only access was asked for: stage it once for writing", name)
	case lower.Held:
		return p.held(lower, "its layer "+name+" is made")
	case c.Unreadable && (!lower.Formatting || source.StaleMark):
		return unreadable(lower, c)
	case source.StaleMark && !maybeBlank(c):
		return p.staleMark(c)
	case lower.Formatting && !maybeBlank(c):
		return p.eraseRemains(p.stack[i-1].Layer, lower, c)
	case lower.Formatting:
		return p.doOn(name, CreateLayer, state.StagePart())
	case lower.Proved && !maybeBlank(c):
		return turnedUp(lower, c)
	case lower.Proved && lower.Noted && i == 1:
		return p.doOn(name, CreateLayer, state.StagePart())
	case i > 1 || !maybeBlank(c):
		return stuck(state.FailedPrecondition, "the volume is neither blank nor bears the layer %s: found %s. Its backing%s is left as it is; to destroy what is there deliberately, %s", name, c.Found, backing(source), p.clearing())
	}
	return p.do(BeginFormat, state.StagePart())
}
