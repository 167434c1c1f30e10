package reconciler

import (
	"context"
	"slices"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// earlier is what a pass observed before its last step that succeeded. The next observation
// of the pass looks only at what that step can have changed, and takes over the rest.
type earlier struct {
	want *state.Volume
	have *state.Actual
	step Step      // that succeeded since
	at   time.Time // of the observation; of its oldest part, if it took some over
}

// takeOver is the greatest age of what an observation takes over. What others change
// meanwhile is seen when the next pass begins, and before a step that destroys.
const takeOver = time.Second

// atTarget reports whether a step changes nothing but its target's path.
func (s Step) atTarget() bool {
	return slices.Contains([]Action{Bind, Unbind, RemoveTarget}, s.Action) && s.Part.Kind == state.TargetKind
}

// onDevice reports whether a step changes no path at all.
func (s Step) onDevice() bool {
	return slices.Contains([]Action{Attach, BeginFormat, Format, Detach}, s.Action)
}

// atStage reports whether a step changes nothing but what is at the staging path.
func (s Step) atStage() bool {
	return (s.Action == Mount || s.Action == Unmount) && s.Part == state.StagePart()
}

// holds reports whether anything can be taken over: only from an observation that
// saw the device, for the same stage, and for a plain volume, which is one file
// system on the device of its backend.
func (e *earlier) holds(want *state.Volume) bool {
	if e == nil || time.Since(e.at) > takeOver || want.Stage == nil || !sameStage(e.want, want) {
		return false
	}
	s, d := want.Stage, e.have.Device
	plain := s.Inline == nil && s.Capability.Access == state.MountAccess && len(e.have.Lower) == 0 && e.have.Source == nil && !e.have.View.Present()
	return plain && !notBegun(s) && d.Err == nil && d.State != state.DeviceUnknown && e.have.Elsewhere == nil
}

// device returns what was seen of the device, if the step left it as it was: it is mounted,
// or not mounted any more. Who holds it must be asked again.
func (e *earlier) device() (d state.Device, ok bool) {
	if e == nil || !e.step.atStage() || !e.have.Device.Attached() {
		return d, false
	}
	d = e.have.Device
	d.Held, d.Holder = false, ""
	return d, true
}

// mounted reports whether the stage is mounted and stays so. Then the device is held
// and shown, whatever changes at a target.
func (e *earlier) mounted() bool {
	m := e.have.Stage
	return !e.want.Stage.Gone && m.Err == nil && len(m.Mounts) == 1 && m.Mounts[0].Is(e.have.Device.Number) && !m.Mounts[0].Corrupt &&
		e.have.Device.Attached() && e.have.Device.ReadOnly == e.want.Stage.ReadOnly && e.have.Keepers == nil
}

// mountpoint returns what was seen at a path, unless the step changed it.
func (e *earlier) mountpoint(path string) (m state.Mountpoint, ok bool) {
	switch {
	case e == nil || e.step.atTarget() && path == e.step.Part.Path || e.step.atStage() && path == e.want.Stage.Path:
		return m, false
	case path == e.want.Stage.Path:
		m = e.have.Stage
	default:
		m = e.have.Targets.At(path)
	}
	return m, m.Err == nil && m.File != state.UnknownFile
}

// contents returns what was seen on a device, if the step changed nothing of that: it
// set the formatting mark of a blank one, or mounted a file system with which nothing
// remains to be done, and that is seen mounted.
func (e *earlier) contents(d state.Device, mounted bool) (c state.Contents, ok bool) {
	if e == nil || d.Number != e.have.Device.Number || e.have.Contents.Err != nil {
		return c, false
	}
	switch c = e.have.Contents; {
	case e.step.Action == BeginFormat:
		return c, c.Kind == state.ContentsBlank
	case e.step.atStage():
		return c, mounted && c.Kind == state.ContentsFilesystem && !c.NeedsCheck && !c.Growable
	}
	return c, false
}

// lookAgain is observeAlone after a step; before is what was seen before it. It also returns
// when the oldest of what it takes over was seen.
func (r *Reconciler) lookAgain(ctx context.Context, want *state.Volume, before *earlier) (*state.Actual, time.Time, error) {
	switch {
	case before.holds(want) && (before.step.onDevice() || before.step.atStage()):
		have, err := r.observeAfter(ctx, want, before, nil)
		return have, before.at, err
	case before.holds(want) && before.step.atTarget() && before.mounted():
		have := *before.have
		have.Targets = r.lookAtTargets(ctx, want, before)
		have.Unfit = r.unfit(want, &have)
		return &have, before.at, nil
	}
	began, last := time.Now(), r.lastAsked(want.ID)
	if have := r.stillMounted(ctx, want, last); have != nil {
		return have, last.at, nil
	}
	have, err := r.observeAfter(ctx, want, nil, last.have)
	return have, began, err
}

// lastAsked returns what was last observed of a volume of which a caller asks something;
// nothing if nobody does, so that all of it is looked at. It has no time, and so is too old
// for stillMounted, if a change of the device was told since, or if callers ask for more
// than the ends of targets.
func (r *Reconciler) lastAsked(id string) (last earlier) {
	r.mu.Lock()
	defer r.mu.Unlock()
	v := r.volume(id)
	if len(v.waiters) > 0 {
		last.want, last.have = v.want, v.have
		if !v.deviceChanged && v.onlyTargetsEnd() {
			last.at = v.deviceSeen
		}
	}
	v.deviceChanged = false // it is looked at now, or did not change
	return last
}

// onlyTargetsEnd reports whether all that callers ask for is that targets are unpublished,
// for which the device need not be asked. The caller holds mu.
func (v *volume) onlyTargetsEnd() bool {
	for w := range v.waiters {
		if w.part.Kind != state.TargetKind || !w.gone || w.ends {
			return false
		}
	}
	return true
}

// stillMounted looks at the paths of a volume, and takes over what was last seen of its
// device, if that is not too old and the same mount shows it; nil: it is, or another one does.
func (r *Reconciler) stillMounted(ctx context.Context, want *state.Volume, last earlier) *state.Actual {
	if !last.holds(want) || !last.mounted() {
		return nil
	}
	have := *last.have
	have.Stage = r.look(ctx, want.Stage.Path)
	if _, ok := contentsOfMount(last.have, &have); !ok {
		return nil
	}
	have.Targets = r.lookAtTargets(ctx, want, nil)
	have.Unfit = r.unfit(want, &have)
	return &have
}

// contentsOfMount returns what was seen on a device before, if the same mount shows it
// since, and nothing remained to be done with the file system.
func contentsOfMount(last, have *state.Actual) (c state.Contents, ok bool) {
	if last == nil || len(last.Stage.Mounts) != 1 || len(have.Stage.Mounts) != 1 || last.Layer != have.Layer {
		return c, false
	}
	c, was, is := last.Contents, last.Stage.Mounts[0], have.Stage.Mounts[0]
	same := is.ID != 0 && is.ID == was.ID && !is.Corrupt && is.Is(have.Device.Number) && last.Device.Number == have.Device.Number && last.Device.Size == have.Device.Size
	return c, same && c.Err == nil && c.Kind == state.ContentsFilesystem && !c.NeedsCheck && !c.Growable
}

func (r *Reconciler) lookAtTargets(ctx context.Context, want *state.Volume, before *earlier) state.Mountpoints {
	targets := make(state.Mountpoints, 0, len(want.Targets))
	for _, path := range want.TargetPaths() {
		targets.Set(path, r.lookUnless(ctx, path, before))
	}
	return targets
}

// lookUnless looks at a path, unless what was seen there before still holds.
func (r *Reconciler) lookUnless(ctx context.Context, path string, before *earlier) state.Mountpoint {
	if m, ok := before.mountpoint(path); ok {
		return m
	}
	return r.look(ctx, path)
}
