package reconciler

import (
	"context"
	"fmt"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
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
		return unseen(d.Err)
	case s.Path != "" && p.have.Stage.Err != nil:
		return unseen(p.have.Stage.Err)
	}
	as := p.adopted(s)
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
	case s.Path != "" && s.Capability.Access != "" && adoptable(as.want, p.have):
		return p.do(Adopt, state.StagePart())
	case d.Missing:
		return stuck(state.NotFound, "no such volume on this node")
	}
	return stuck(state.FailedPrecondition, "%v", state.ErrNotStaged)
}

// adopted returns a planner for the stage that would be adopted. What the provisional
// stage does not say is taken from the mount.
func (p *planner) adopted(s *state.Stage) *planner {
	as := &planner{want: p.want.Clone(), have: p.have}
	as.want.Stage.ReadOnly = p.have.Device.ReadOnly
	if c := &as.want.Stage.Capability; c.Access == state.MountAccess && c.FSType == "" && len(p.have.Stage.Mounts) > 0 {
		c.FSType = p.have.Stage.Mounts[0].FSType // whatever is mounted is what was asked for
	}
	return as
}

// checkAdopted compares a target with an adopted stage. For a stage that is in the
// record, the edit that asks for the target does so.
func (p *planner) checkAdopted(t *state.Target) Verdict {
	if s := p.want.Stage; s.Adopted && s.ReadOnly && !t.ReadOnly && !t.Accepted {
		return stuck(state.FailedPrecondition, "the volume is staged read-only at %s, and publishing it for writing was asked for", s.Path)
	}
	return settled
}

// adopt turns a provisional stage into a real one, with what was observed of it.
func (r *Reconciler) adopt(ctx context.Context, want *state.Volume, have state.Actual) error {
	backend, err := r.backendOf(ctx, want)
	if err != nil {
		return err
	}
	as := (&planner{want: want, have: have}).adopted(want.Stage).want.Stage
	options := ""
	if len(have.Stage.Mounts) > 0 {
		options = have.Stage.Mounts[0].Options
	}
	_, err = r.store.Edit(want.ID, func(v *state.Volume) error {
		if v.Stage != nil && v.Stage.Revision == want.Stage.Revision && v.Stage.Provisional {
			v.Adopt(as.Capability.FSType, options, as.ReadOnly, backend)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing the record: %w", err)
	}
	klog.FromContext(ctx).Info("Adopted a stage that no intent explained", "path", as.Path)
	return nil
}

// backendOf names the backend of a volume whose record does not name it; empty: there
// is only one backend.
func (r *Reconciler) backendOf(ctx context.Context, want *state.Volume) (string, error) {
	all, several := r.kernel.Devices.(interface {
		Resolve(ctx context.Context, v devices.Volume) (string, error)
	})
	if want.Backend != "" || !several {
		return want.Backend, nil
	}
	return all.Resolve(ctx, r.spec(want))
}

// unfit returns, for parts for which nothing was done yet, errors that do not depend
// on the device. With such an error the volume must not even be attached.
func (r *Reconciler) unfit(want *state.Volume, have state.Actual) map[state.Part]error {
	var all map[state.Part]error
	note := func(part state.Part, err error) {
		if err == nil {
			return
		}
		if all == nil {
			all = map[state.Part]error{}
		}
		all[part] = err
	}
	if s := want.Stage; s != nil && notBegun(s) && !s.Provisional && have.Stage.Err == nil {
		err := r.inLostVolume(want, s.Path)
		if err == nil {
			err = r.refusedOptions(s.Capability)
		}
		note(state.StagePart(), err)
	}
	for path, t := range want.Targets {
		if !t.Gone && !t.Accepted && !t.Begun && have.Targets[path].Err == nil {
			note(state.TargetPart(path), r.inLostVolume(want, path))
		}
	}
	return all
}

// refusedOptions returns why the kernel refuses the mount flags of a stage.
func (r *Reconciler) refusedOptions(c state.Capability) error {
	if c.Access != state.MountAccess || c.FSType == "" {
		return nil // not chosen yet
	}
	flags, err := state.ParseFlags(c.Flags)
	if err != nil {
		return err
	}
	return r.kernel.Mounts.CheckOptions(c.FSType, flags)
}

// inLostVolume refuses a path inside a volume without a record, such as after the loss
// of the store, or inside a mount of the volume itself that is not in its record. For
// volumes with a record, the store refuses paths that overlap.
func (r *Reconciler) inLostVolume(want *state.Volume, path string) error {
	if r.kernel.VolumeAt == nil {
		return nil
	}
	m, point, err := r.kernel.Mounts.Above(path)
	if err != nil || point == "" {
		return err
	}
	other := r.kernel.VolumeAt(m.Device)
	switch {
	case other == "", other != want.ID && r.store.Get(other) != nil:
		return nil
	case other == want.ID && (want.Targets[point] != nil || want.Stage != nil && want.Stage.Path == point):
		return nil
	}
	return state.Errorf(state.FailedPrecondition, "the path %s lies in volume %s, which is mounted at %s, and two must lie apart: choose another path, or end that by NodeUnpublishVolume and NodeUnstageVolume", path, other, point)
}
