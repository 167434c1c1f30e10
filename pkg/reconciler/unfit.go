package reconciler

import "github.com/csi-node/csi-node/pkg/state"

// unfit returns the errors that do not depend on the device, of parts for which nothing was
// done yet: with such an error the volume must not even be attached. It also returns why the
// file or directory at a target that ends is not the plugin's to remove.
func (r *Reconciler) unfit(want *state.Volume, have *state.Actual) map[state.Part]error {
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
		err := r.inLostVolume(want, s.Path, have.Stage)
		if err == nil {
			err = r.refusedOptions(s.Capability)
		}
		note(state.StagePart(), err)
	}
	for path, t := range want.Targets {
		switch m := have.Targets.At(path); {
		case m.Err != nil:
		case !t.Gone && !t.Accepted && !t.Begun:
			note(state.TargetPart(path), r.inLostVolume(want, path, m))
		case t.Gone && !t.Withdrawn && len(m.Mounts) == 0 && m.File != state.NoFile:
			note(state.TargetPart(path), r.inSomeVolume(path, m))
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
func (r *Reconciler) inLostVolume(want *state.Volume, path string, seen state.Mountpoint) error {
	other, point, err := r.volumeAbove(path, seen)
	switch {
	case err != nil:
		return err
	case other == "", other != want.ID && r.store.Get(other) != nil:
		return nil
	case other == want.ID && (want.Targets[point] != nil || want.Stage != nil && want.Stage.Path == point):
		return nil
	}
	return state.Errorf(state.FailedPrecondition, "the path %s lies in volume %s, which is mounted at %s, and two must lie apart: choose another path, or end that by NodeUnpublishVolume and NodeUnstageVolume", path, other, point)
}

// inSomeVolume tells of the volume that a path lies in: what is there is part of its data.
func (r *Reconciler) inSomeVolume(path string, seen state.Mountpoint) error {
	id, point, err := r.volumeAbove(path, seen)
	if err != nil || point == "" {
		return err
	}
	for _, other := range r.store.VolumesAt(point) { // one that is mounted from a source has no device
		if v := r.store.Get(other); v != nil && v.Targets[point] != nil {
			id = other
		}
	}
	if id == "" {
		return nil
	}
	return state.Errorf(state.FailedPrecondition, "the path %s lies in volume %s, which is mounted at %s", path, id, point)
}

// volumeAbove returns the volume, by its device, in a mount of which a path lies, and where that
// is; an empty point if the path lies in none.
func (r *Reconciler) volumeAbove(path string, seen state.Mountpoint) (id, point string, err error) {
	if r.kernel.VolumeAt == nil || seen.Apart {
		return "", "", nil
	}
	m, point, err := r.kernel.Mounts.Above(path)
	if err != nil || point == "" {
		return "", "", err
	}
	return r.kernel.VolumeAt(m.Device), point, nil
}
