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
	if err := r.confirm(ctx, step, want, have); err != nil {
		return err
	}
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
		return k.Mounts.MountDevice(ctx, d, s.Path, s.Capability.FSType, flags, s.ReadOnly)
	case SetAttributes:
		return r.setAttributes(ctx, s, t)
	case AttachView:
		return k.Views.AttachView(ctx, d)
	case MarkRaw:
		return k.Devices.BeginRaw(ctx, spec(want))
	case Bind:
		return r.bind(ctx, s, t, have)
	}
	return state.Errorf(state.Internal, "unknown step %s", step)
}

// confirm looks again, right before a step that destroys or takes something away,
// at what the planner saw and the step stands on: that it is the same device, with
// the same marks, and that nobody has it now.
func (r *Reconciler) confirm(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
	switch step.Action {
	case Detach, BeginFormat, Erase, Format:
	default:
		return nil
	}
	now, err := r.kernel.Devices.Find(ctx, spec(want))
	if err != nil {
		return err
	}
	if was := have.Device; !sameDevice(now, was) {
		return state.Errorf(state.Unavailable, "the device has changed since it was looked at: it was %s, and is %s", tellDevice(was), tellDevice(now))
	}
	view, err := r.kernel.Views.FindView(ctx, now)
	if err != nil {
		return err
	}
	if view.State != state.DeviceAbsent {
		return state.Errorf(state.Unavailable, "the device %s has a read-only view, %s, since it was looked at", now.Path, view.Path)
	}
	if now.Held, err = r.kernel.Views.Held(ctx, now); err != nil {
		return err
	}
	unbound := *want
	unbound.Targets = nil // they were seen not to show it
	if err := r.boundElsewhere(ctx, &unbound, &now); err != nil {
		return err
	}
	if now.Held {
		return fmt.Errorf("the device %s is held since it was looked at: %s", now.Path, r.whoHolds(ctx, now))
	}
	if step.Action != Format {
		return nil // what an Erase finds does not matter, and BeginFormat proves it
	}
	c, err := r.kernel.Filesystems.Probe(ctx, now, "")
	if err == nil && !maybeBlank(c) {
		err = state.Errorf(state.Unavailable, "the device %s is not blank any more since it was looked at: found %s", now.Path, c.Found)
	}
	return err
}

// sameDevice reports whether two looks saw the same device, and the same facts
// about formatting it.
func sameDevice(a, b state.Device) bool {
	return a.State == b.State && a.Number == b.Number && a.Identity == b.Identity && a.ReadOnly == b.ReadOnly && a.Missing == b.Missing &&
		a.Formatting == b.Formatting && a.Formatted == b.Formatted && a.Raw == b.Raw && (a.Err == nil) == (b.Err == nil)
}

// tellDevice says what sameDevice compares.
func tellDevice(d state.Device) string {
	text := fmt.Sprintf("%s %s, %s", d.Number, d.State, access(d.ReadOnly))
	if d.Identity != "" {
		text += ", " + d.Identity
	}
	return fmt.Sprintf("%s (missing %t, mark %t, formatted %q, raw %t, facts unread %t)", text, d.Missing, d.Formatting, d.Formatted, d.Raw, d.Err != nil)
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
	if d.Held, err = r.kernel.Views.Held(ctx, d); err == nil {
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

func (r *Reconciler) bind(ctx context.Context, s *state.Stage, t *state.Target, have state.Actual) error {
	if t.Capability.Access == state.BlockAccess {
		if needsView(t, have.Device) {
			return r.kernel.Mounts.BindDevice(ctx, have.View, t.Path)
		}
		return r.kernel.Mounts.BindDevice(ctx, have.Device, t.Path)
	}
	flags, err := targetFlags(s, t)
	if err != nil {
		return err
	}
	return r.kernel.Mounts.BindMount(ctx, s.Path, have.Device.Number, t.Path, flags)
}
