package reconciler

import (
	"slices"

	"github.com/csi-node/csi-node/pkg/state"
)

// A publish or an expansion that finds no record of a stage means that the store was
// lost: the CO does not stage again what it believes staged. Its edit writes a
// provisional stage. That is adopted if the volume is seen to be staged; otherwise the
// request is refused, and both are forgotten.

// provisional plans towards the adoption of a stage.
func (p *planner) provisional(s *state.Stage) Verdict {
	d := p.have.Device
	switch {
	case d.Err != nil:
		return stuckOn(d.Err)
	case s.Path != "" && p.have.Stage.Err != nil:
		return stuckOn(p.have.Stage.Err)
	}
	as := newPlanner(adopted(p.want, p.have), p.have)
	if p.have.Source != nil && s.Path != "" && s.Capability.Access != "" { // such a stage is only a record, so there is nothing to see
		if v := as.sourceStage(as.want.Stage); !v.Settled {
			return v
		}
		return p.do(Adopt, state.StagePart())
	}
	if v := as.preexistingMount(as.want.Stage); !v.Settled && len(p.have.Stage.Mounts) > 0 {
		return v
	}
	switch {
	case s.Path != "" && s.Capability.Access != "" && as.adoptable(as.want.Stage):
		return p.do(Adopt, state.StagePart())
	case d.Missing:
		return stuck(state.NotFound, noSuchVolume)
	}
	return stuck(state.FailedPrecondition, "%v", state.ErrNotStaged)
}

// adopted returns the record with the stage that would be adopted. What the provisional
// stage does not say is taken from the mount.
func adopted(want *state.Volume, have *state.Actual) *state.Volume {
	as := want.Clone()
	as.Stage.ReadOnly = have.Device.ReadOnly
	if c := &as.Stage.Capability; c.Access == state.MountAccess && c.FSType == "" && len(have.Stage.Mounts) > 0 {
		c.FSType = have.Stage.Mounts[0].FSType // whatever is mounted is what was asked for
	}
	return as
}

// adoptable reports whether the volume is seen to be staged as asked. Its device may
// be smaller than its backing: an expansion was interrupted.
func (p *planner) adoptable(s *state.Stage) bool {
	unlike := func(e state.Element) bool { return !e.Device.Attached() || e.Device.ReadOnly != s.ReadOnly }
	switch {
	case slices.ContainsFunc(p.stack, unlike), p.unknownDevice():
		return false
	case s.Capability.Access == state.BlockAccess:
		return p.raw(s).Settled
	case p.have.Stage.Err != nil, len(p.have.Stage.Mounts) == 0, p.broken():
		return false
	}
	return p.keepMounted(s).Settled
}

// checkAdopted compares a target with an adopted stage. For a stage that is in the
// record, the edit that asks for the target does so.
func (p *planner) checkAdopted(t *state.Target) Verdict {
	if s := p.want.Stage; s.Adopted && s.ReadOnly && !t.ReadOnly && !t.Accepted {
		return stuck(state.FailedPrecondition, "the volume is staged read-only at %s, and publishing it for writing was asked for", s.Path)
	}
	return settled
}
