package reconciler

import "github.com/csi-node/csi-node/pkg/state"

// sourceStage judges the stage of a volume that has no device: it is a record, and
// each target is a mount of its own.
func (p *planner) sourceStage(s *state.Stage) Verdict {
	d, source := p.have.Device, p.have.Source
	switch {
	case d.Err != nil:
		return stuckOn(d.Err)
	case d.Missing:
		return stuck(state.NotFound, "no such volume")
	case s.Capability.Access == state.BlockAccess:
		return stuck(state.InvalidArgument, "the volume is mounted from %s and is no block device", source.Source)
	case s.Capability.FSType != "" && s.Capability.FSType != source.FSType:
		return stuck(state.InvalidArgument, "the volume is mounted as %s, and %s was asked for; a PersistentVolume without fsType takes what is there", source.FSType, s.Capability.FSType)
	}
	return settled
}
