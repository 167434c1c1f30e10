package reconciler

import (
	"regexp"

	"github.com/csi-node/csi-node/pkg/state"
)

// inline plans the creation of an inline volume, which comes before all other steps.
func (p *planner) inline(s *state.Stage) Verdict {
	if s.Inline == nil || s.Inline.Made {
		return settled
	}
	switch o := p.owner(); o.State {
	case state.OwnerUnknown:
		return stuckOn(o.Err)
	case state.OwnerOther:
		return stuck(state.AlreadyExists, "there is a volume of that id, and it does not belong to the pod at %s", s.Inline.Target)
	}
	return p.do(CreateVolume, state.StagePart())
}

// owner returns the observed owner of an inline volume, and notes that the plan
// depends on it. If it is unknown, Err says why.
func (p *planner) owner() state.Owner {
	p.asks = true
	if o := p.have.Owner; o.State != state.OwnerUnknown || o.Err != nil {
		return o
	}
	return state.Owner{Err: errUnseen}
}

// end plans the end of a stage, and then of the inline volume that ends with it. If
// its owner cannot be known, only the data is kept.
func (p *planner) end(s *state.Stage) Verdict {
	if s.Inline == nil || !s.Inline.Ended {
		return p.unstage(s)
	}
	if target := state.TargetPart(s.Inline.Target); p.want.Intent(target) != nil && !p.plan.Verdicts.Of(target).Settled {
		return Verdict{Needs: []state.Part{target}}
	}
	if s.Provisional {
		return p.endUnrecorded(s)
	}
	if v := p.unstage(s); !v.Settled {
		return v
	}
	switch m := p.have.Stage; {
	case m.File == state.Directory && m.Empty:
		return p.do(RemoveStage, state.StagePart()) // before the volume, so that a retry still finds the owner
	case m.File != state.NoFile:
		return stuck(state.FailedPrecondition, "what is at the staging path %s is not the volume's: move it away, it is not removed", s.Path)
	case !s.Inline.Made:
		return settled
	}
	switch o := p.owner(); {
	case o.State == state.OwnerOther:
		return settled
	case o.Err == errUnseen:
		return stuckOn(o.Err)
	case o.State == state.OwnerUnknown && state.ClassOf(o.Err) == state.DeadlineExceeded:
		return p.do(LeaveVolume, state.StagePart())
	}
	return p.do(DeleteVolume, state.StagePart()) // the record names the owner
}

// endUnrecorded plans the end of a volume whose record was lost, which may be an inline one.
// If the backend cannot tell whether it is one, its data is left. One that is mounted where
// only inline volumes are is taken down, also if the backend has it no more.
func (p *planner) endUnrecorded(s *state.Stage) Verdict {
	if !s.Inline.Made {
		return settled // it was left
	}
	switch o := p.owner(); {
	case o.State == state.OwnerSame, o.State == state.OwnerNone && p.stageIsOurs():
		return p.do(AdoptInline, state.StagePart())
	case o.State != state.OwnerUnknown:
		return settled
	case o.Err == errUnseen:
		return stuckOn(o.Err)
	}
	return p.do(LeaveVolume, state.StagePart())
}

// awaitEnd keeps the publish that an inline volume lives for from being settled before
// the volume has ended.
func (p *planner) awaitEnd(s *state.Stage) {
	if s.Inline == nil || !s.Inline.Ended || p.plan.Verdicts.Of(state.StagePart()).Settled {
		return
	}
	target := state.TargetPart(s.Inline.Target)
	if p.plan.Verdicts.Of(target).Settled {
		p.setVerdict(target, Verdict{Needs: []state.Part{state.StagePart()}})
	}
}

// kubeletID matches the ids that kubelet gives to inline ephemeral volumes
// (makeVolumeHandle in its CSI volume plugin).
var kubeletID = regexp.MustCompile(`^csi-[0-9a-f]{64}$`)
