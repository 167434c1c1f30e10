package reconciler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/state"
)

// run does one step between its hooks and reports it to log and metrics.
func (r *Reconciler) run(ctx context.Context, step Step, want *state.Volume, have *state.Actual) error {
	start := time.Now()
	err := r.hooked(ctx, step, want, have)
	took := time.Since(start)
	if err != nil {
		err = state.InVolume(want.ID, "step "+step.String(), err)
	}
	if r.metrics != nil {
		r.metrics.Step(step.Action, took, err)
	}
	logger := klog.FromContext(ctx)
	if err != nil {
		logger.Error(err, "Step failed", "step", step.Action, "part", step.Part, "took", took)
	} else if logger := logger.V(4); logger.Enabled() { // else the arguments would be made for nothing
		logger.Info("Step done", "step", step.Action, "part", step.Part, "took", took)
	}
	return err
}

func (r *Reconciler) hooked(ctx context.Context, step Step, want *state.Volume, have *state.Actual) error {
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

// do carries out a step. These are all the ways in which the plugin changes a node, but for giveBack.
func (r *Reconciler) do(ctx context.Context, step Step, want *state.Volume, have *state.Actual) error {
	k, s, t, d := r.kernel, want.Stage, want.Targets[step.Part.Path], have.Device
	if err := r.confirm(ctx, step, want, have); err != nil {
		return r.abandonUnlessWritten(ctx, want, err)
	}
	switch step.Action {
	case Unbind:
		return k.Mounts.Unmount(ctx, t.Path)
	case RemoveTarget:
		return k.Directories.Remove(ctx, t.Path)
	case Unmount:
		return k.Mounts.UnmountDevice(ctx, s.Path)
	case Release:
		return r.release(ctx, want)
	case DetachView:
		return k.Views.DetachView(ctx, d)
	case Detach:
		return k.Devices.Detach(ctx, r.spec(want))
	case Choose:
		return r.choose(want, have)
	case Adopt:
		return r.adopt(ctx, want, have)
	case CreateVolume:
		return r.createInline(ctx, want, have)
	case AdoptInline:
		return r.adoptInline(want, have)
	case RemoveStage:
		return k.Directories.Remove(ctx, s.Path)
	case DeleteVolume:
		return r.deleteInline(ctx, want, have)
	case LeaveVolume:
		return r.leaveInline(ctx, want, have.Owner.Err)
	case Attach:
		return r.attach(ctx, want)
	case GrowDevice:
		bytes := have.Lowest().Capacity
		if step.Part == state.SizePart() {
			bytes = state.RoundUp(want.Size.Bytes + missingOverhead(want, have))
		}
		return k.Devices.Grow(ctx, r.spec(want), bytes)
	case CreateLayer:
		return r.createLayer(ctx, step, want, have)
	case OpenLayer, CloseLayer, GrowLayer:
		return r.onLayer(ctx, step, want, have)
	case BeginFormat:
		return r.beginFormat(ctx, want, have)
	case AbandonFormat:
		return r.abandonFormat(ctx, want, have)
	case Erase:
		return r.erase(ctx, step.Layer, want, have)
	case Format:
		return r.format(ctx, step.Layer, want, have)
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
		return whenFree(ctx, func() error {
			return r.mounter(step, want).MountDevice(ctx, d, s.Path, s.Capability.FSType, flags, s.ReadOnly)
		})
	case MountSource:
		return mountSource(ctx, r.mounter(step, want), s, t, have)
	case SetAttributes:
		return r.setAttributes(ctx, s, t)
	case AttachView:
		return r.attachView(ctx, want, d)
	case MarkRaw:
		return r.markRaw(ctx, want, have)
	case Bind:
		return bind(ctx, r.mounter(step, want), s, t, have)
	}
	return state.Errorf(state.Internal, "unknown step %s", step)
}

// attachView attaches the view of the volume's device d. Whose device that is is confirmed
// afterwards: until the view has it open, somebody may detach it, and another get its number.
func (r *Reconciler) attachView(ctx context.Context, want *state.Volume, d state.Device) error {
	if err := r.kernel.Views.AttachView(ctx, d); err != nil {
		return err
	}
	look, err := r.stack(ctx, want)
	if now := look.Device; err != nil || now.State == state.DeviceUnknown || now.Present() && now.Number == d.Number {
		return err
	}
	err = state.Errorf(state.Unavailable, "%s is not the volume's device any more, since its view was attached: it was detached meanwhile", d.Path)
	return errors.Join(err, r.kernel.Views.DetachView(ctx, d))
}

// indexOf returns the index in the stack of the element that a layer made; 0, which is
// the source, for the empty name.
func indexOf(have *state.Actual, layer string) int {
	return slices.IndexFunc(have.Stack(), func(e state.Element) bool { return e.Layer == layer })
}

// layerOf returns a layer of the volume and the element beneath it.
func (r *Reconciler) layerOf(have *state.Actual, name string) (devices.Layer, state.Device, error) {
	i := indexOf(have, name)
	for _, l := range r.kernel.Layers {
		if l.Name() == name && i > 0 {
			return l, have.Stack()[i-1].Device, nil
		}
	}
	return nil, state.Device{}, state.Errorf(state.Internal, "the volume has no layer %q", name)
}

// onLayer does the steps that only the layer's own code can do.
func (r *Reconciler) onLayer(ctx context.Context, step Step, want *state.Volume, have *state.Actual) error {
	l, lower, err := r.layerOf(have, step.Layer)
	if err != nil {
		return err
	}
	switch v := r.spec(want); step.Action {
	case OpenLayer:
		return l.Open(ctx, lower, v, want.Stage.ReadOnly)
	case CloseLayer:
		return l.Close(ctx, lower, v)
	case GrowLayer:
		return l.Grow(ctx, lower, v)
	case Erase:
		return l.Erase(ctx, lower, v)
	}
	return state.Errorf(state.Internal, "unknown step %s", step)
}

// choose decides the type of file system for an empty fs_type: what the volume was
// formatted as or holds, else what it was created for, else this node's default for its size.
func (r *Reconciler) choose(want *state.Volume, have *state.Actual) error {
	holds := ""
	if have.Contents.Kind == state.ContentsFilesystem && !have.Device.Formatting { // else it is not kept
		holds = have.Contents.FSType
	}
	types := []string{have.Device.Formatted, holds}
	switch {
	case have.Layer != "": // the metadata does not know what is in it
		types = types[1:]
	case have.Device.Noted: // another node may have used the disk since
		slices.Reverse(types)
	}
	chosen := want.Stage.Capability
	chosen.FSType = cmp.Or(append(types, have.Device.CreatedFor, r.kernel.Filesystems.Default(have.Device.Size))...)
	if err := r.refusedOptions(chosen); err != nil { // before anything is written
		return err
	}
	_, err := r.store.Edit(want.ID, func(v *state.Volume) error {
		if v.Stage != nil && v.Stage.Revision == want.Stage.Revision && !v.Stage.Gone {
			v.Choose(chosen.FSType)
		}
		return nil
	})
	return err
}

// releaseLimit is how long release waits for a device that is about to become free:
// when the last copy of a mount goes, such as with a container that ends, the kernel
// writes the file system back before it lets go of the device, and sends no event.
const (
	releaseLimit    = 500 * time.Millisecond
	releaseInterval = 5 * time.Millisecond
)

// whenFree calls mount, and again for a moment while the device is busy: whoever tests
// whether it is in use, such as a question about the volume's health, claims it for
// that long.
func whenFree(ctx context.Context, mount func() error) (err error) {
	poll.Until(ctx, releaseInterval, releaseLimit, func() bool {
		err = mount()
		return !errors.Is(err, unix.EBUSY)
	})
	return err
}

// release takes the copies of an unmounted stage out of other mount
// namespaces. Open files still hold the device after that.
func (r *Reconciler) release(ctx context.Context, want *state.Volume) error {
	if err := r.kernel.Directories.Renew(ctx, want.Stage.Path); err != nil {
		return err
	}
	have, err := r.stack(ctx, want)
	if err != nil {
		return err
	}
	stack := have.Stack()
	d := stack[highest(stack)].Device
	if !presentOrStray(d) {
		return nil
	}
	poll.Until(ctx, releaseInterval, releaseLimit, func() bool {
		d.Held, err = r.kernel.Views.Held(ctx, d)
		return err != nil || !d.Held
	})
	if err == nil {
		err = r.noteBoundElsewhere(ctx, want, &d, mayHaveCopies(want))
	}
	if err != nil || !d.Held {
		return err
	}
	return fmt.Errorf("the device %s is still held, which must end before it is detached: %s", d.Path, r.holder(ctx, d))
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

// mounter returns Existing, which does not make missing mount points, for a repair
// that nobody waits for; else Mounts.
func (r *Reconciler) mounter(step Step, want *state.Volume) Mounter {
	if intent := want.Intent(step.Part); intent.Accepted && !intent.CallerWaits && !(step.Part == state.StagePart() && callerNeedsStage(want)) {
		return r.kernel.Existing
	}
	return r.kernel.Mounts
}

func mountSource(ctx context.Context, to Mounter, s *state.Stage, t *state.Target, have *state.Actual) error {
	flags, err := targetFlags(s, t)
	if err != nil {
		return err
	}
	return to.MountSource(ctx, *have.Source, t.Path, flags)
}

func bind(ctx context.Context, m Mounter, s *state.Stage, t *state.Target, have *state.Actual) error {
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
