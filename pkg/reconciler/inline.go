package reconciler

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Inline is where inline ephemeral volumes are.
type Inline struct {
	devices.Inliner
	Backend    string // its name
	StagingDir string // holds a directory for each volume
	// Spell returns the one spelling that a path has in the records. The metadata of
	// volumes that an earlier version made may have another.
	Spell func(ctx context.Context, path string) (string, error)
}

// Staging returns where the volume is staged; empty: there can be no such volume.
func (i *Inline) Staging(id string) string {
	if i == nil || id != filepath.Base(id) || id == "." || id == ".." {
		return ""
	}
	return filepath.Join(i.StagingDir, id)
}

// ownerTimeout bounds the wait for the backend, whose disk may hang.
const ownerTimeout = 2 * time.Second

// owner asks the backend who owns a volume, and waits at most ownerTimeout.
func (r *Reconciler) owner(ctx context.Context, want *state.Volume) state.Owner {
	in := r.kernel.Inline
	if in == nil {
		return state.Owner{Err: state.Errorf(state.Unavailable, "no backend of this plugin takes inline ephemeral volumes")}
	}
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	o, err := r.owners.Do(ctx, want.ID, hang.NoLimit, func() (state.Owner, error) { return in.owner(ctx, want), nil })
	if err != nil {
		return state.Owner{Err: fmt.Errorf("the backend %s does not answer: %w", in.Backend, ctx.Err())}
	}
	return o
}

func (i *Inline) owner(ctx context.Context, want *state.Volume) state.Owner {
	owner, target, err := i.ownerOf(ctx, want.ID)
	switch class := state.ClassOf(err); {
	case err == nil && owner == nil, err != nil && class == state.InvalidArgument:
		return state.Owner{State: state.OwnerOther}
	case err != nil && class == state.NotFound:
		return state.Owner{State: state.OwnerNone}
	case err != nil && class.Final():
		return state.Owner{Err: state.Errorf(state.Unavailable, "%w", err)}
	case err != nil:
		return state.Owner{Err: err}
	}
	o := state.Owner{State: state.OwnerOther, Target: owner.Target, PodUID: owner.PodUID}
	if asked := want.Stage.Inline; target == asked.Target && (asked.PodUID == owner.PodUID || want.Stage.Gone) {
		o.State = state.OwnerSame
	}
	return o
}

// ownerOf returns the owner of a volume, and its target path in the spelling of the
// records; nil: it is no inline volume.
func (i *Inline) ownerOf(ctx context.Context, id string) (owner *devices.InlineOwner, target string, err error) {
	if owner, err = i.InlineOwner(ctx, id); err == nil && owner != nil {
		target, err = i.Spell(ctx, owner.Target)
	}
	return owner, target, err
}

// createInline lets the backend make an inline volume, which may be there already.
func (r *Reconciler) createInline(ctx context.Context, want *state.Volume, have *state.Actual) error {
	in, asked, fsType := r.kernel.Inline, want.Stage.Inline, want.Stage.Capability.FSType
	made, err := in.MakeInline(ctx, devices.InlineRequest{
		ID: want.ID, Attributes: asked.Attributes, Secrets: r.secrets.get(want.ID),
		Owner: devices.InlineOwner{PodUID: asked.PodUID, Target: cmp.Or(have.Owner.Target, asked.Target)},
		Filesystem: func(bytes int64) (string, int64) {
			fsType := cmp.Or(fsType, r.kernel.Filesystems.Default(bytes))
			return fsType, r.kernel.Filesystems.Smallest(fsType)
		},
	})
	if err != nil {
		return err
	}
	r.sweep.volumeMade()
	return r.noteInline(want, func(_ *state.Volume, i *state.Inline) { i.Made, i.Used = true, i.Used || made.Used })
}

// noteInline edits the record of an inline volume, if it still has the same stage.
func (r *Reconciler) noteInline(want *state.Volume, note func(*state.Volume, *state.Inline)) error {
	_, err := r.store.Edit(want.ID, func(v *state.Volume) error {
		if revision(v, state.StagePart()) == want.Stage.Revision && v.Stage.Inline != nil {
			note(v, v.Stage.Inline)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("writing the record: %w", err)
	}
	return nil
}

// adoptInline notes that a volume which is taken down without a record is the inline
// volume of its target.
func (r *Reconciler) adoptInline(want *state.Volume, have *state.Actual) error {
	uid := have.Owner.PodUID
	return r.noteInline(want, func(v *state.Volume, i *state.Inline) {
		v.Stage.Provisional, i.PodUID, v.Backend = false, uid, cmp.Or(v.Backend, r.kernel.Inline.Backend)
	})
}

// deleteInline deletes an inline volume with its data, after it has confirmed what
// the planner saw. If the owner is unknown and the deletion fails for now, the data is
// left to the sweep.
func (r *Reconciler) deleteInline(ctx context.Context, want *state.Volume, have *state.Actual) error {
	if err := r.confirmEnded(ctx, want, have); err != nil {
		return err
	}
	err := r.kernel.Inline.DeleteVolume(ctx, devices.Volume{ID: want.ID, Backend: r.kernel.Inline.Backend})
	switch {
	case err == nil:
		return r.noteInline(want, func(_ *state.Volume, i *state.Inline) { i.Made = false })
	case have.Owner.State == state.OwnerSame || state.ClassOf(err).Final():
		return err
	}
	return r.leaveInline(ctx, want, err)
}

// confirmEnded observes again, right before a volume is deleted: it must still be the
// volume that ended, and nothing of it may be mounted or attached.
func (r *Reconciler) confirmEnded(ctx context.Context, want *state.Volume, have *state.Actual) error {
	if now := r.store.Get(want.ID); revision(now, state.StagePart()) != want.Stage.Revision || !now.Stage.LivesFor(want.Stage.Inline.Target) || !now.Stage.Inline.Ended {
		return state.Errorf(state.Aborted, "superseded by a later request")
	}
	look, err := r.stack(ctx, want)
	if err != nil {
		return err
	}
	for _, e := range look.Stack() {
		if e.Device.State == state.DeviceUnknown || presentOrStray(e.Device) {
			return state.Errorf(state.Unavailable, "a device stands for the volume since it was looked at: %s", describeDevice(e.Device))
		}
	}
	p := newPlanner(want, look)
	for _, path := range append(want.TargetPaths(), want.Stage.Path) {
		if m := r.look(ctx, path); unknown(m) {
			return m.Err
		} else if path == want.Stage.Path && m.File != state.NoFile || slices.ContainsFunc(m.Mounts, p.ours) {
			return state.Errorf(state.Unavailable, "something is at %s since it was looked at", path)
		}
	}
	if o := r.owner(ctx, want); o.State != have.Owner.State || o.PodUID != have.Owner.PodUID {
		return state.Errorf(state.Unavailable, "the owner of the volume has changed since it was looked at")
	}
	return nil
}

// leaveInline leaves the data of a volume to the sweep, which deletes it once the
// backend answers and the pod is gone, if it is an inline volume.
func (r *Reconciler) leaveInline(ctx context.Context, want *state.Volume, why error) error {
	logger := klog.FromContext(ctx)
	may := want.Stage.Provisional && !kubeletID.MatchString(want.ID)
	if may {
		logger.Error(why, "Whether this is an ephemeral volume is not known; if it is, it is deleted once its backend answers and the pod is gone")
	} else {
		logger.Error(why, "An ephemeral volume has ended, and its data is not deleted yet: that is tried again when the pod is gone")
	}
	r.sweep.lookNow()
	return r.noteInline(want, func(v *state.Volume, i *state.Inline) { v.Stage.Provisional, i.Made = may, false })
}
