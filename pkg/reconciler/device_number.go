package reconciler

import (
	"context"
	"slices"

	"github.com/csi-node/csi-node/pkg/state"
)

// anothersNumber returns an error if a device of a volume, which nobody uses yet, got a number with
// which pods have another volume: they would be shown this one. The device that they had is gone, or
// there would be no such number, and no backend but those of package loop knows of it.
func (r *Reconciler) anothersNumber(want *state.Volume, have *state.Actual) error {
	if want.Stage == nil || want.Stage.Gone || have.View.Present() {
		return nil
	}
	for _, e := range have.Stack() {
		owner := r.store.VolumeOfDevice(e.Device.Number)
		if e.Device.Attached() && owner != "" && owner != want.ID && !mayShow(want, have, e.Device.Number) {
			return state.Errorf(state.Unavailable, "volume %s: its device %s got the number %s, with which pods have the volume %s, whose own device is gone: they would be shown this volume, so it is given back. Restart the pods of %s first", want.ID, e.Device.Path, e.Device.Number, owner, owner)
		}
	}
	return nil
}

// mayShow reports whether a device is seen at a path of the volume, was published with its number, or
// may be.
func mayShow(want *state.Volume, have *state.Actual, number state.DeviceNumber) bool {
	shows := func(m state.Mountpoint) bool {
		return unknown(m) || slices.ContainsFunc(m.Mounts, func(m state.Mount) bool { return m.Is(number) })
	}
	for path, t := range want.Targets {
		if t.Device == number || shows(have.Targets.At(path)) {
			return true
		}
	}
	return want.Stage.Path != "" && shows(have.Stage)
}

// giveBack closes the uppermost layer of a volume that nobody uses, or detaches its device. No step of a
// plan would: they leave a device alone whose number is bound.
func (r *Reconciler) giveBack(ctx context.Context, want *state.Volume, have *state.Actual) error {
	step, stack := Step{Action: Detach, Part: state.StagePart()}, have.Stack()
	if at := highest(stack); at > 0 {
		step.Action, step.Layer = CloseLayer, stack[at].Layer
	}
	r.begin(want.ID, step)
	defer r.end(want.ID)
	if step.Action == CloseLayer {
		return r.onLayer(ctx, step, want, have)
	}
	return r.kernel.Devices.Detach(ctx, r.spec(want))
}

// withhold keeps a volume from use: nothing is done but to end what is to end, and the parts that
// are asked for are stuck on err.
func (p *Plan) withhold(want *state.Volume, err error) {
	going := func(part state.Part) bool { intent := want.Intent(part); return intent != nil && intent.Gone }
	p.Steps = slices.DeleteFunc(p.Steps, func(s Step) bool { return !going(s.Part) })
	for i, one := range p.Verdicts {
		if !going(one.part) {
			p.Verdicts[i].verdict = stuckOn(err)
		}
	}
}
