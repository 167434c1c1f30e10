package reconciler

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/deadline"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// Observe returns the actual state of a volume, whose record need not be in the store.
// It changes nothing, and leaves out who holds the device. Facts of the backend that
// cannot be read are an error. ctx ends only the wait: if a look hangs, the next one at
// the volume waits for it.
func (r *Reconciler) Observe(ctx context.Context, want *state.Volume) (state.Actual, error) {
	waiting, stop := deadline.UntilAnswer(ctx)
	defer stop()
	have, err := r.looks.Do(waiting, want.ID, hang.NoLimit, func() (state.Actual, error) {
		have, err := r.observe(ctx, want, nil, nil)
		if err == nil {
			err = have.Device.Err
		}
		return *have, err
	})
	late, is := err.(*hang.Unanswered)
	if !is {
		return have, err
	}
	what := "step look has been running"
	if late.Earlier {
		what = "waiting for an earlier look at the volume, which has been running"
	}
	return state.Actual{}, fmt.Errorf("volume %s: %s since %s: %w", want.ID, what, state.Clock(late.Since), late.Unwrap())
}

// observeAlone is Observe for the volume's worker. Only the worker may ask whether the
// device is held. It also names the holders of a device that is to be detached, and
// what keeps a broken file system.
func (r *Reconciler) observeAlone(ctx context.Context, want *state.Volume) (*state.Actual, error) {
	return r.observeAfter(ctx, want, nil, nil)
}

// observeAfter is observeAlone, and takes over what the step after before cannot have
// changed, and what is on a device that is mounted as it was when last was seen.
func (r *Reconciler) observeAfter(ctx context.Context, want *state.Volume, before *earlier, last *state.Actual) (*state.Actual, error) {
	have, err := r.observe(ctx, want, before, last)
	if err == nil {
		err = r.noteHeld(ctx, want, have)
	}
	if err == nil {
		err = r.noteOtherMounts(ctx, want, have)
	}
	if err == nil {
		err = r.noteOtherBinds(ctx, want, have)
	}
	if err == nil {
		r.noteKeepers(ctx, want, have)
		r.noteHolders(ctx, want, have)
	}
	return have, err
}

// noteHeld notes which devices are in use.
func (r *Reconciler) noteHeld(ctx context.Context, want *state.Volume, have *state.Actual) (err error) {
	for _, d := range devicesOf(have) {
		if !presentOrStray(*d) {
			continue
		}
		if d.Held = isMounted(have, d.Number); d.Held {
			continue // to ask would wait for the end of a claim
		}
		if d.Held, err = r.kernel.Views.Held(ctx, *d); err != nil {
			return state.InVolume(want.ID, "observe", fmt.Errorf("whether %s (%s) is in use: %w", d.Path, d.Number, err))
		}
	}
	return nil
}

// noteOtherMounts notes where else the file system is mounted, if the plan depends on that.
func (r *Reconciler) noteOtherMounts(ctx context.Context, want *state.Volume, have *state.Actual) (err error) {
	if asksElsewhere(want.Stage, have) {
		if have.Elsewhere, err = r.kernel.Mounts.Elsewhere(ctx, have.Device.Number); err != nil {
			return state.InVolume(want.ID, "observe", err)
		}
		if have.Elsewhere != nil {
			have.Elsewhere.Mount.Options = r.kernel.Filesystems.Options(have.Elsewhere.Mount)
		}
	}
	if s := want.Stage; s != nil && s.Unrecorded() && have.Device.Held && have.Stage.Err == nil {
		if have.Others, err = r.kernel.Mounts.MountedAt(ctx, have.Device.Number); err != nil {
			return state.InVolume(want.ID, "observe", err)
		}
		have.Others = slices.DeleteFunc(have.Others, func(path string) bool { return path == s.Path })
	}
	return nil
}

// noteOtherBinds notes where devices that may have to be taken down are bound besides.
func (r *Reconciler) noteOtherBinds(ctx context.Context, want *state.Volume, have *state.Actual) error {
	s := want.Stage
	wrong := func(e state.Element) bool { return e.Device.Stray || e.Device.ReadOnly != s.ReadOnly }
	if s != nil && !s.Gone && !have.View.Present() && !slices.ContainsFunc(have.Stack(), wrong) {
		return nil
	}
	for _, d := range devicesOf(have) {
		if err := r.noteBoundElsewhere(ctx, want, d, mayHaveCopies(want)); err != nil {
			return err
		}
	}
	return nil
}

// noteKeepers notes what keeps a broken file system.
func (r *Reconciler) noteKeepers(ctx context.Context, want *state.Volume, have *state.Actual) {
	s := want.Stage
	if s == nil || s.Gone || !anyCorrupt(have) {
		return
	}
	if p := newPlanner(want, have); p.broken() {
		have.Keepers = r.kernel.Mounts.Keepers(ctx, have.Device.Number, append(want.TargetPaths(), s.Path))
	}
}

// noteHolders notes who holds devices that are to be detached.
func (r *Reconciler) noteHolders(ctx context.Context, want *state.Volume, have *state.Actual) {
	if want.Stage == nil || !want.Stage.Gone || len(have.Stage.Mounts) > 0 {
		return
	}
	for _, d := range devicesOf(have) {
		if d != &have.View && d.Holder == "" && (d.Held || d.State == state.DeviceDetaching) {
			d.Holder = r.findHolder(ctx, *d)
		}
	}
}

// anyCorrupt reports whether a mount is seen that does not work any more.
func anyCorrupt(have *state.Actual) bool {
	corrupt := func(m state.Mount) bool { return m.Corrupt }
	for _, m := range have.Targets.All() {
		if slices.ContainsFunc(m.Mounts, corrupt) {
			return true
		}
	}
	return slices.ContainsFunc(have.Stage.Mounts, corrupt)
}

// asksElsewhere reports whether the plan depends on where else the file system is mounted:
// before anything was done for the stage, and if it is to be checked or to grow unmounted.
func asksElsewhere(s *state.Stage, have *state.Actual) bool {
	return s != nil && !s.Gone && s.Capability.Access == state.MountAccess && have.Device.Held && have.Stage.Err == nil && len(have.Stage.Mounts) == 0 &&
		(notBegun(s) || have.Contents.NeedsCheck || have.Contents.Growable)
}

// isMounted reports whether the file system on a device is seen mounted at the stage or at a
// target: then the device is held.
func isMounted(have *state.Actual, device state.DeviceNumber) bool {
	if isMountedAt(have.Stage, device) {
		return true
	}
	for _, m := range have.Targets.All() {
		if isMountedAt(m, device) {
			return true
		}
	}
	return false
}

// isMountedAt reports whether the file system on a device is seen mounted at one place.
func isMountedAt(m state.Mountpoint, device state.DeviceNumber) bool {
	return slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return !m.Node && m.Is(device) })
}

// devicesOf returns the devices of a volume, the view last.
func devicesOf(have *state.Actual) []*state.Device {
	all := []*state.Device{&have.Device}
	for i := range have.Lower {
		all = append(all, &have.Lower[i].Device)
	}
	return append(all, &have.View)
}

// noteBoundElsewhere sets Held for a device whose node is bound where the record has no
// target, because the number must not become another volume's beneath that bind.
// Kernel.Bound excludes such a bind in this mount namespace without a look at the mount
// table. Copies in other mount namespaces are found only in the mount tables of all.
func (r *Reconciler) noteBoundElsewhere(ctx context.Context, want *state.Volume, d *state.Device, copies bool) error {
	if !presentOrStray(*d) {
		return nil
	}
	if !copies && r.kernel.Bound != nil {
		if bound, err := r.kernel.Bound(d.Number); err == nil && !bound {
			return nil
		}
	}
	paths, err := r.kernel.Mounts.BoundAt(ctx, d.Number)
	if err != nil {
		return state.InVolume(want.ID, "observe", err)
	}
	paths = slices.DeleteFunc(paths, func(path string) bool { return want.Targets[path] != nil })
	if len(paths) > 0 {
		d.Held, d.Holder = true, "it is bound at "+strings.Join(paths, ", ")+", unpublish it there"
		if others := r.findHolder(ctx, *d); others != "" {
			d.Holder += "; " + others
		}
	}
	return nil
}

// mayHaveCopies reports whether other mount namespaces may have copies of binds of the
// device's node. The node of a volume that is staged as a file system is bound nowhere.
func mayHaveCopies(want *state.Volume) bool {
	return want.Stage == nil || want.Stage.Capability.Access != state.MountAccess
}

// observe looks at everything that the record is about, except what it can take over
// from before and last, which may be nil.
func (r *Reconciler) observe(ctx context.Context, want *state.Volume, before *earlier, last *state.Actual) (have *state.Actual, err error) {
	have = &state.Actual{}
	defer func() {
		if err != nil {
			err = state.InVolume(want.ID, "observe", err)
		}
	}()
	if d, ok := before.device(); ok {
		have.Device = d
	} else if err = r.lookAtStack(ctx, want, have); err != nil {
		return have, err
	}
	if presentOrStray(have.Device) {
		if have.View, err = r.kernel.Views.FindView(ctx, have.Device); err != nil {
			return have, err
		}
	} else if have.Device.State != state.DeviceUnknown {
		have.View.State = state.DeviceAbsent // there is no view without its device
	}
	if want.Stage != nil && want.Stage.Path != "" {
		have.Stage = r.lookUnless(ctx, want.Stage.Path, before)
		if s := want.Stage; notBegun(s) && len(have.Stage.Mounts) > 0 {
			have.Stage.Mounts[0].Options = r.kernel.Filesystems.Options(have.Stage.Mounts[0])
		}
	}
	if s := want.Stage; s != nil && s.Next != nil && s.Next.Path != s.Path {
		have.Next = r.look(ctx, s.Next.Path)
	}
	have.Targets = r.lookAtTargets(ctx, want, before)
	if have.Unfit = r.unfit(want, have); want.Stage != nil && want.Stage.Inline != nil && makePlan(want, have).asks {
		have.Owner = r.owner(ctx, want)
	}
	if needsContents(want, have) {
		mountpoint := ""
		if len(have.Stage.Mounts) > 0 && have.Stage.Mounts[0].Is(have.Device.Number) && !have.Stage.Mounts[0].Corrupt {
			mountpoint = want.Stage.Path
		}
		if c, ok := before.contents(have.Device, mountpoint != ""); ok {
			have.Contents = c
		} else if c, ok := contentsOfMount(last, have); ok {
			have.Contents = c
		} else if have.Contents, err = r.kernel.Filesystems.Probe(ctx, sourceFresh(have.Layer, have.Device), mountpoint); err != nil {
			have.Contents = state.Contents{Err: err}
		}
		have.Smallest = r.kernel.Filesystems.Smallest(want.Stage.Capability.FSType)
	}
	if lower := beneathUnmade(have); lower != nil && want.Stage != nil && !want.Stage.Gone {
		if have.Beneath, err = r.kernel.Filesystems.Probe(ctx, sourceFresh(lower.Layer, lower.Device), ""); err != nil {
			have.Beneath = state.Contents{Err: err}
		}
	}
	return have, nil
}

// beneathUnmade returns the attached element on which the next layer is to be made; nil: none.
func beneathUnmade(have *state.Actual) *state.Element {
	if len(have.Lower) == 0 {
		return nil
	}
	stack := have.Stack()
	for i, e := range stack {
		if e.Device.Unmade && i > 0 && stack[i-1].Device.Attached() {
			return &stack[i-1]
		}
	}
	return nil
}

// sourceFresh returns the device of a layer, or the source, for those who read or format it:
// as Fresh only if it is the source. The stamp of a new layer says that its device holds
// nobody's data, but not that it is zero: it may show older data of the element
// beneath, or what an interrupted format wrote.
func sourceFresh(layer string, d state.Device) state.Device {
	d.Fresh = d.Fresh && layer == ""
	return d
}

// stack looks at the devices of a volume only.
func (r *Reconciler) stack(ctx context.Context, want *state.Volume) (*state.Actual, error) {
	have := &state.Actual{}
	return have, r.lookAtStack(ctx, want, have)
}

// lookAtStack looks at the devices of a volume, and notes them in have.
func (r *Reconciler) lookAtStack(ctx context.Context, want *state.Volume, have *state.Actual) (err error) {
	v := r.spec(want)
	have.Device, err = r.kernel.Devices.Find(ctx, v)
	switch class := state.ClassOf(err); {
	case err == nil:
	case class == state.InvalidArgument:
		have.Device = state.Device{State: state.DeviceAbsent, Missing: true} // no volume has such an id
	case class.Final():
		return state.Errorf(state.Unavailable, "%w", err) // final only once the undo is seen
	default:
		return err
	}
	if err := have.Device.Err; err != nil {
		err = state.InVolume(want.ID, "observe", err)
		if state.ClassOf(err).Final() {
			err = state.Errorf(state.Unavailable, "%w", err)
		}
		have.Device.Err = err
	}
	if m, ok := r.kernel.Devices.(devices.MountSource); ok {
		source, mounted, err := m.Source(ctx, v)
		if err != nil { // then whether it has a device is unknown too, and any mount may be of the volume
			have.Device = state.Device{Err: state.Errorf(state.Unavailable, "volume %s: observe: what is mounted for it is not known: %w", want.ID, err)}
			return nil
		}
		if mounted {
			have.Source = &source
			return nil
		}
	}
	source := have.Device
	for _, l := range r.kernel.Layers {
		wanted := l.Wanted(v)
		if !wanted && contextKnown(want.Stage) {
			continue
		}
		d, err := l.Find(ctx, have.Device, v)
		if err != nil {
			if state.ClassOf(err).Final() {
				err = state.Errorf(state.Unavailable, "%w", err)
			}
			return fmt.Errorf("layer %s: %w", l.Name(), err)
		}
		if !wanted && !presentOrStray(d) { // where the contexts are not known, the device tells whether there is a layer
			continue
		}
		// The facts about the data are the source's. The stamp of a new layer is to
		// its device what the mark of a format is to the source.
		d.Missing, d.Identity, d.CreatedFor = source.Missing, source.Identity, source.CreatedFor
		d.Formatting, d.Raw = d.Fresh, source.Raw && !d.Fresh
		if d.Err == nil {
			d.Err = source.Err
		}
		have.Lower = append(have.Lower, state.Element{Layer: have.Layer, Device: have.Device})
		have.Layer, have.Device = l.Name(), d
	}
	if r.needsSecretFromCall(want.ID) {
		for _, d := range devicesOf(have) {
			d.NeedsSecret, d.GrowsOpen = true, false
		}
	}
	return nil
}

// contextKnown reports whether the contexts of a volume are those that the CO gave, be
// they empty. Those of a stage that was found without a record are guesses.
func contextKnown(s *state.Stage) bool {
	return s != nil && (len(s.Context) > 0 || !s.Adopted && s.Capability.Access != "")
}

// lookTimeout bounds the look at one path: a dead file system must not hold up the
// worker and the volume's other targets.
const lookTimeout = 5 * time.Second

// look looks at a path. Its error becomes a part of the result, so that the rest of
// the volume is still observed.
func (r *Reconciler) look(ctx context.Context, path string) state.Mountpoint {
	m, err := r.kernel.Mounts.Look(ctx, path, lookTimeout)
	if err != nil {
		return state.Mountpoint{Err: err}
	}
	return m
}

// needsContents reports whether the plan depends on what the device holds.
func needsContents(want *state.Volume, have *state.Actual) bool {
	s := want.Stage
	return have.Device.Attached() && have.Device.Err == nil && s != nil && !s.Gone && s.Capability.Access == state.MountAccess
}

// findHolder names who holds a device, for humans; empty: nobody is seen.
func (r *Reconciler) findHolder(ctx context.Context, d state.Device) string {
	if r.kernel.Holders == nil {
		return ""
	}
	return strings.Join(r.kernel.Holders(ctx, d.Number), ", ")
}

// holder names who holds a device that is held.
func (r *Reconciler) holder(ctx context.Context, d state.Device) string {
	if d.Holder == "" {
		d.Holder = r.findHolder(ctx, d)
	}
	return knownHolder(d)
}

// knownHolder is holder without a look.
func knownHolder(d state.Device) string {
	if d.Holder != "" {
		return d.Holder
	}
	return "it is mounted or claimed elsewhere, perhaps in another mount namespace"
}
