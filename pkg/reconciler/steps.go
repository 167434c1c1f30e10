package reconciler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// run does one step between its hooks and reports it to log and metrics.
func (r *Reconciler) run(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
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
	} else {
		logger.V(4).Info("Step done", "step", step.Action, "part", step.Part, "took", took)
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

// do carries out a step. These are all the ways in which the plugin changes a node.
func (r *Reconciler) do(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
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
		if err := k.Filesystems.Prove(ctx, have.Lowest()); err != nil {
			return err
		}
		if have.Lowest().Noted {
			return nil // the mark comes right before the format
		}
		return k.Devices.BeginFormat(ctx, r.spec(want))
	case AbandonFormat:
		return r.abandonFormat(ctx, want, have)
	case Erase:
		return r.erase(ctx, step.Layer, want, have)
	case Format:
		// If an observation did not read all of the device, the step before has proved
		// it blank, or it may hold the remains of an interrupted format; or what others have
		// put there, and then Format refuses it. Noise is nobody's data, as long as the
		// device is stamped new.
		d = sourceFresh(state.Element{Layer: have.Layer, Device: d})
		if have.Contents.Kind != state.ContentsBlank && !d.Fresh && !d.Noise && !d.StaleMark && !d.Proved {
			if err := r.erase(ctx, step.Layer, want, have); err != nil {
				return err
			}
			d.Fresh = have.Layer != "" // every byte of it is zero now
		}
		format := func() error { return k.Filesystems.Format(ctx, d, s.Capability.FSType) }
		if d.Noted {
			last := func(ctx context.Context) (string, error) { return r.tryFormat(ctx, want, d) }
			format = func() error { return k.Filesystems.FormatAfter(ctx, d, s.Capability.FSType, last) }
		}
		if err := format(); err != nil && step.Layer == "" {
			return r.abandonUnlessWritten(ctx, want, err)
		} else if err != nil {
			return err
		}
		return r.endFormat(ctx, step.Layer, want, have, s.Capability.FSType)
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
		return r.whenFree(ctx, func() error {
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
	if now := look.Device; err != nil || now.State == state.DeviceUnknown || present(now) && now.Number == d.Number {
		return err
	}
	err = state.Errorf(state.Unavailable, "%s is not the volume's device any more, since its view was attached: it was detached meanwhile", d.Path)
	return errors.Join(err, r.kernel.Views.DetachView(ctx, d))
}

// confirm observes the device again right before a step that destroys or takes
// something away: it must be the same device that the planner saw, with the same
// marks, and nobody may hold it.
func (r *Reconciler) confirm(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
	at := 0 // in the stack
	switch step.Action {
	case Detach, BeginFormat, AbandonFormat:
	case Erase, Format:
		at = indexOf(have, step.Layer)
	case CreateLayer:
		at = indexOf(have, step.Layer) - 1
	default:
		return nil
	}
	look, err := r.stack(ctx, want)
	if err != nil {
		return err
	}
	was, is := have.Stack(), look.Stack()
	for i := range was {
		if len(is) != len(was) || !sameDevice(is[i].Device, was[i].Device) || i > at && presentOrStray(is[i].Device) {
			return state.Errorf(state.Unavailable, "the device has changed since it was looked at: it was %s, and is %s", describeDevices(was), describeDevices(is))
		}
	}
	now := is[at].Device
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
	unbound.Targets = nil // the planner saw that they do not show it
	// Other mount namespaces need no look: copies there come from a bind here.
	if err := r.noteBoundElsewhere(ctx, &unbound, &now, false); err != nil {
		return err
	}
	if now.Held {
		return fmt.Errorf("the device %s is held since it was looked at: %s", now.Path, r.holder(ctx, now))
	}
	if step.Action == Erase && now.FormatUUID != "" {
		return r.confirmRemains(ctx, now)
	}
	if step.Action != Format && step.Action != CreateLayer || step.Action == Format && now.Noise {
		return nil // Erase destroys any contents, BeginFormat proves them blank, and a new layer's may be noise
	}
	now.Fresh = now.Fresh || was[at].Device.Fresh // though it bears the mark by now, see pass.step
	c, err := r.kernel.Filesystems.Probe(ctx, sourceFresh(state.Element{Layer: is[at].Layer, Device: now}), "")
	if err == nil && !maybeBlank(c) && !(step.Action == CreateLayer && !have.Stack()[at+1].Device.Unmade) {
		err = state.Errorf(state.Unavailable, "the device %s is not blank any more since it was looked at: found %s", now.Path, c.Found)
		if at == 0 {
			err = &state.Unwritten{Err: err}
		}
	}
	return err
}

// confirmRemains returns an error unless what is on a device can be what a format has left.
func (r *Reconciler) confirmRemains(ctx context.Context, d state.Device) error {
	c, err := r.kernel.Filesystems.Probe(ctx, d, "")
	switch {
	case err != nil:
		return err
	case maybeBlank(c), c.Origin == state.OriginFormat, c.Origin == state.OriginUnnamed:
		return nil
	}
	return state.Errorf(state.Unavailable, "the device %s holds something else since it was looked at: found %s", d.Path, c.Found)
}

// indexOf returns the index in the stack of the element that a layer made; 0, which is
// the source, for the empty name.
func indexOf(have state.Actual, layer string) int {
	return slices.IndexFunc(have.Stack(), func(e state.Element) bool { return e.Layer == layer })
}

// layerOf returns a layer of the volume and the element beneath it.
func (r *Reconciler) layerOf(have state.Actual, name string) (devices.Layer, state.Device, error) {
	i := indexOf(have, name)
	for _, l := range r.kernel.Layers {
		if l.Name() == name && i > 0 {
			return l, have.Stack()[i-1].Device, nil
		}
	}
	return nil, state.Device{}, state.Errorf(state.Internal, "the volume has no layer %q", name)
}

// onLayer does the steps that only the layer's own code can do.
func (r *Reconciler) onLayer(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
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

// createLayer makes a layer on the element beneath, which then counts as formatted.
func (r *Reconciler) createLayer(ctx context.Context, step Step, want *state.Volume, have state.Actual) error {
	l, lower, err := r.layerOf(have, step.Layer)
	if err != nil {
		return err
	}
	v, beneath := r.spec(want), have.Stack()[indexOf(have, step.Layer)-1].Layer
	if have.Beneath.Kind == state.ContentsUnproven && !lower.Proved && !sourceFresh(state.Element{Layer: beneath, Device: lower}).Fresh { // as for Format
		blank := func() error { return r.erase(ctx, beneath, want, have) }
		if lower.StaleMark {
			blank = func() error { return r.kernel.Filesystems.Prove(ctx, lower) }
		}
		if err := blank(); err != nil {
			return err
		}
	}
	if lower.Noted && have.Stack()[indexOf(have, step.Layer)].Device.Unmade { // what is made must not get a stamp
		if lower.FormatUUID, err = r.tryFormat(ctx, want, lower); err != nil {
			return r.abandonUnlessWritten(ctx, want, err)
		}
	}
	if err := l.Create(ctx, lower, v); err != nil {
		lower.Fresh = false // it may have been written to
		c, unread := r.kernel.Filesystems.Probe(ctx, lower, "")
		if c.Kind == state.ContentsUnproven && lower.Noted { // what is left of a layer may begin behind all signatures
			unread = errors.Join(unread, r.kernel.Filesystems.Prove(ctx, lower))
		}
		if beneath == "" && unread == nil && maybeBlank(c) {
			err = &state.Unwritten{Err: err}
		}
		return r.abandonUnlessWritten(ctx, want, err)
	}
	return r.endFormat(ctx, beneath, want, have, l.Name())
}

// tryFormat sets the formatting mark of a Noted device that was proved blank, once the device
// was seen to keep what is written to it, and returns the UUID of the mark. What a disk
// holds that only read as zeros is never erased then, whenever the plugin is killed: it
// does not bear the UUID.
func (r *Reconciler) tryFormat(ctx context.Context, want *state.Volume, d state.Device) (uuid string, err error) {
	v := r.spec(want)
	noted := func(such func(state.Device) bool) error { // nothing is believed
		now, err := r.kernel.Devices.Find(ctx, v)
		if err == nil && (uuid == "" || now.Number != d.Number || !such(now)) {
			err = state.Errorf(state.Unavailable, "the device has changed, or its note was not written: it was %s, and is %s", describeDevice(d), describeDevice(now))
		}
		return err
	}
	if uuid, err = r.kernel.Devices.TryFormat(ctx, v); err != nil {
		return "", err
	}
	if err := noted(func(now state.Device) bool { return now.Trial == uuid && !now.Formatting }); err != nil {
		return "", err
	}
	if err := r.kernel.Filesystems.Try(ctx, d, uuid); err != nil {
		return "", err
	}
	if err := r.kernel.Devices.BeginFormat(ctx, v); err != nil {
		return "", err
	}
	return uuid, noted(func(now state.Device) bool { return now.Formatting && now.FormatUUID == uuid })
}

// abandonFormat ends a format whose mark is on a device that holds something else. A file
// system there is no new one, and never formatted.
func (r *Reconciler) abandonFormat(ctx context.Context, want *state.Volume, have state.Actual) error {
	klog.FromContext(ctx).Info("A format was begun, and the device holds something else, which is left as it is", "found", have.Contents.Found+have.Beneath.Found)
	if have.Layer == "" && have.Contents.Kind == state.ContentsFilesystem {
		return r.kernel.Devices.EndFormat(ctx, r.spec(want), have.Contents.FSType)
	}
	return r.kernel.Devices.AbandonFormat(ctx, r.spec(want))
}

// leaveData is what becomes of an Erase when nothing was written since the device was proved
// blank and marked: what has turned up there is left as it is.
func (r *Reconciler) leaveData(ctx context.Context, _ Step, want *state.Volume, have state.Actual) error {
	found := have.Contents.Found
	if len(have.Stack()) > 1 {
		found = have.Beneath.Found
	}
	err := state.Errorf(state.Unavailable, turnedUpText, have.Lowest().Path, found)
	err = state.InVolume(want.ID, "format", r.abandonUnlessWritten(ctx, want, &state.Unwritten{Err: err}))
	klog.FromContext(ctx).Error(err, "Data has turned up on a device that was proved blank")
	return err
}

// abandonUnlessWritten returns err, and takes the formatting mark of the volume's source back if
// nothing there is of the format that failed: a disk that read as zeros for a while has
// its data again later, and what bears the mark would be erased.
func (r *Reconciler) abandonUnlessWritten(ctx context.Context, want *state.Volume, err error) error {
	if errors.As(err, new(*state.Unwritten)) {
		err = errors.Join(err, r.kernel.Devices.AbandonFormat(context.WithoutCancel(ctx), r.spec(want)))
	}
	return err
}

// erase zeroes the element of a layer, or the source.
func (r *Reconciler) erase(ctx context.Context, layer string, want *state.Volume, have state.Actual) error {
	if layer != "" {
		return r.onLayer(ctx, Step{Action: Erase, Layer: layer}, want, have)
	}
	return r.kernel.Devices.Erase(ctx, r.spec(want))
}

// endFormat clears the mark of the element of a layer, or of the source.
func (r *Reconciler) endFormat(ctx context.Context, layer string, want *state.Volume, have state.Actual, as string) error {
	if layer == "" {
		return r.kernel.Devices.EndFormat(ctx, r.spec(want), as)
	}
	l, lower, err := r.layerOf(have, layer)
	if err != nil {
		return err
	}
	return l.Used(ctx, lower, r.spec(want))
}

// markRaw sets the durable mark of a device that is published raw for writing.
func (r *Reconciler) markRaw(ctx context.Context, want *state.Volume, have state.Actual) error {
	if err := r.kernel.Devices.BeginRaw(ctx, r.spec(want)); err != nil || have.Layer == "" || !have.Device.Fresh {
		return err
	}
	return r.endFormat(ctx, have.Layer, want, have, "")
}

// sameDevice reports whether two looks saw the same device, and the same facts
// about formatting it.
func sameDevice(a, b state.Device) bool {
	return a.State == b.State && a.Number == b.Number && a.Identity == b.Identity && a.ReadOnly == b.ReadOnly && a.Commands == b.Commands && a.Missing == b.Missing && a.Unmade == b.Unmade && a.Stray == b.Stray &&
		a.Formatting == b.Formatting && a.FormatUUID == b.FormatUUID && a.Formatted == b.Formatted && a.Raw == b.Raw && (a.Err == nil) == (b.Err == nil)
}

// describeDevices says what sameDevice compares.
func describeDevices(stack []state.Element) string {
	var words []string
	for _, e := range stack {
		words = append(words, strings.TrimSpace(e.Layer+" "+describeDevice(e.Device)))
	}
	return strings.Join(words, "; beneath ")
}

func describeDevice(d state.Device) string {
	text := fmt.Sprintf("%s %s, %s", d.Number, d.State, access(d.ReadOnly))
	if d.Identity != "" {
		text += ", " + d.Identity
	}
	return fmt.Sprintf("%s (missing %t, mark %t, formatted %q, raw %t, facts unread %t)", text, d.Missing, d.Formatting, d.Formatted, d.Raw, d.Err != nil)
}

// choose decides the type of file system for an empty fs_type: what the volume was
// formatted as, else what it was created for, else this node's default for its size.
func (r *Reconciler) choose(want *state.Volume, have state.Actual) error {
	d, formatted := have.Device, have.Device.Formatted
	if have.Layer != "" { // the metadata does not know the contents of a layer
		formatted = have.Contents.FSType
	}
	fsType := cmp.Or(formatted, d.CreatedFor, r.kernel.Filesystems.Default(d.Size))
	_, err := r.store.Edit(want.ID, func(v *state.Volume) error {
		if v.Stage != nil && v.Stage.Revision == want.Stage.Revision && !v.Stage.Gone {
			v.Choose(fsType)
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
func (r *Reconciler) whenFree(ctx context.Context, mount func() error) error {
	limit := time.NewTimer(releaseLimit)
	defer limit.Stop()
	again := time.NewTicker(releaseInterval)
	defer again.Stop()
	for {
		err := mount()
		if !errors.Is(err, unix.EBUSY) {
			return err
		}
		select {
		case <-again.C:
		case <-limit.C:
			return err
		case <-ctx.Done():
			return err
		}
	}
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
	d := newPlanner(want, have).top()
	if !presentOrStray(d) {
		return nil
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

func mountSource(ctx context.Context, to Mounter, s *state.Stage, t *state.Target, have state.Actual) error {
	flags, err := targetFlags(s, t)
	if err != nil {
		return err
	}
	return to.MountSource(ctx, *have.Source, t.Path, flags)
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
