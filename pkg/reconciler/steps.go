package reconciler

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// run does one step between its hooks and reports it to log and metrics.
func (r *Reconciler) run(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
	start := time.Now()
	err := r.hooked(ctx, step, want, have)
	took := time.Since(start)
	if err != nil {
		err = fmt.Errorf("volume %s: step %s: %w", want.ID, step, err)
	}
	if r.metrics != nil {
		r.metrics.Step(step.Action, took, err)
	}
	logger := klog.FromContext(ctx)
	if err != nil {
		logger.Error(err, "Step failed", "step", step.Action, "part", step.Part, "took", took)
	} else {
		logger.V(2).Info("Step done", "step", step.Action, "part", step.Part, "took", took)
	}
	return err
}

func (r *Reconciler) hooked(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
	if r.hook == nil {
		return r.do(ctx, step, want, have)
	}
	if err := r.hook(ctx, want.ID, step, Before); err != nil {
		return err
	}
	if err := r.do(ctx, step, want, have); err != nil {
		return err
	}
	return r.hook(ctx, want.ID, step, After)
}

// do is the whole list of what the plugin does to a node.
func (r *Reconciler) do(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
	k, s, t, d := r.kernel, want.Stage, want.Targets[step.Part.Path], have.Device
	switch step.Action {
	case Unbind:
		return k.Mounts.Unmount(ctx, t.Path)
	case RemoveTarget:
		return k.Directories.Remove(ctx, t.Path)
	case Unmount:
		return k.Mounts.Unmount(ctx, s.Path)
	case Release:
		return r.release(ctx, want)
	case DetachView:
		return k.Views.DetachView(ctx, d)
	case Detach:
		return k.Devices.Detach(ctx, spec(want))
	case Choose:
		return r.choose(ctx, want, d)
	case Attach:
		return k.Devices.Attach(ctx, spec(want), s.ReadOnly)
	case GrowDevice:
		bytes := d.Capacity
		if step.Part == state.SizePart() {
			bytes = want.Size.Rounded()
		}
		return k.Devices.Grow(ctx, spec(want), bytes)
	case BeginFormat:
		if err := k.Filesystems.Prove(ctx, d); err != nil {
			return err
		}
		return k.Devices.BeginFormat(ctx, spec(want))
	case Erase:
		return k.Devices.Erase(ctx, spec(want))
	case Format:
		// What a look did not read through was proven in the step before, or may
		// be left by a format that was interrupted.
		if have.Contents.Kind != state.ContentsBlank && !d.Fresh {
			if err := k.Devices.Erase(ctx, spec(want)); err != nil {
				return err
			}
		}
		if err := k.Filesystems.Format(ctx, d, s.Capability.FSType); err != nil {
			return err
		}
		return k.Devices.EndFormat(ctx, spec(want), s.Capability.FSType)
	case Check:
		return k.Filesystems.Check(ctx, d, have.Contents.FSType)
	case GrowFilesystem:
		mountpoint := ""
		if len(have.Stage.Mounts) > 0 {
			mountpoint = s.Path
		}
		return k.Filesystems.Grow(ctx, d, have.Contents.FSType, mountpoint)
	case Mount:
		flags, err := stageFlags(s)
		if err != nil {
			return err
		}
		return r.mounter(step, want).MountDevice(ctx, d, s.Path, s.Capability.FSType, flags, s.ReadOnly)
	case SetAttributes:
		return r.setAttributes(ctx, s, t)
	case AttachView:
		return k.Views.AttachView(ctx, d)
	case MarkRaw:
		return k.Devices.BeginRaw(ctx, spec(want))
	case Bind:
		return bind(ctx, r.mounter(step, want), s, t, have)
	}
	return state.Errorf(state.Internal, "unknown step %s", step)
}

// choose settles what an empty fs_type means: what the volume was formatted as,
// else what it was created for, else this node's default for its size. The flags
// must go with it: a volume must not be formatted for flags with which it cannot
// be mounted.
func (r *Reconciler) choose(ctx context.Context, want *state.Volume, d state.Device) error {
	fsType := cmp.Or(d.Formatted, d.CreatedFor, r.kernel.Filesystems.Default(d.Size))
	flags, err := state.ParseFlags(want.Stage.Capability.Flags)
	if err != nil {
		return err
	}
	if err := r.kernel.Mounts.CheckOptions(fsType, flags); err != nil {
		return err
	}
	_, err = r.store.Edit(want.ID, func(v *state.Volume) error {
		if v.Stage != nil && v.Stage.Revision == want.Stage.Revision && !v.Stage.Gone {
			v.Choose(fsType)
		}
		return nil
	})
	return err
}

// releaseLimit is how long release waits for those who let go of a device just
// now: the kernel writes a file system back, and only then lets go of its device, for
// whoever had the last copy of its mount, such as a container that ends. Nobody
// tells when that is over.
const (
	releaseLimit    = 500 * time.Millisecond
	releaseInterval = 5 * time.Millisecond
)

// release takes the copies of an unmounted stage out of other mount
// namespaces. Open files still hold the device after that.
func (r *Reconciler) release(ctx context.Context, want *state.Volume) error {
	if err := r.kernel.Directories.Renew(ctx, want.Stage.Path); err != nil {
		return err
	}
	d, err := r.kernel.Devices.Find(ctx, spec(want))
	if err != nil || !stands(d) {
		return err
	}
	limit := time.NewTimer(releaseLimit)
	defer limit.Stop()
	again := time.NewTicker(releaseInterval)
	defer again.Stop()
	for last := false; ; {
		if d.Held, err = r.kernel.Views.Held(ctx, d); err != nil || !d.Held || last {
			break
		}
		select {
		case <-again.C:
		case <-limit.C:
			last = true
		case <-ctx.Done():
			last = true
		}
	}
	if err == nil {
		err = r.boundElsewhere(ctx, want, &d)
	}
	if err != nil || !d.Held {
		return err
	}
	if d.Holder == "" {
		d.Holder = r.holders(ctx, d)
	}
	return fmt.Errorf("the device %s is still held, which must end before it is detached: %s", d.Path, holder(d))
}

func (r *Reconciler) setAttributes(ctx context.Context, s *state.Stage, t *state.Target) error {
	path := s.Path
	flags, err := stageFlags(s)
	if t != nil {
		path = t.Path
		flags, err = targetFlags(s, t)
	}
	if err != nil {
		return err
	}
	return r.kernel.Mounts.SetAttributes(ctx, path, flags)
}

// mounter makes what is missing beneath a mount only for whoever asks for it, or
// has not had it yet.
func (r *Reconciler) mounter(step Step, want *state.Volume) Mounter {
	if intent := want.Intent(step.Part); intent.Accepted && !intent.Asked && !(step.Part == state.StagePart() && stageAsked(want)) {
		return r.kernel.Existing
	}
	return r.kernel.Mounts
}

func bind(ctx context.Context, m Mounter, s *state.Stage, t *state.Target, have state.Actual) error {
	if t.Capability.Access == state.BlockAccess {
		if needsView(t, have.Device) {
			return m.BindDevice(ctx, have.View, t.Path)
		}
		return m.BindDevice(ctx, have.Device, t.Path)
	}
	flags, err := targetFlags(s, t)
	if err != nil {
		return err
	}
	return m.BindMount(ctx, s.Path, have.Device.Number, t.Path, flags)
}
