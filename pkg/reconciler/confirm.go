package reconciler

import (
	"context"
	"fmt"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// confirm observes the device again right before a step that destroys or takes
// something away: it must be the same device that the planner saw, with the same
// marks, and nobody may hold it.
func (r *Reconciler) confirm(ctx context.Context, step Step, want *state.Volume, have *state.Actual) error {
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
	c, err := r.kernel.Filesystems.Probe(ctx, sourceFresh(is[at].Layer, now), "")
	if err == nil && !maybeBlank(c) && !(step.Action == CreateLayer && !was[at+1].Device.Unmade) {
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
	text := fmt.Sprintf("%s %s, %s", d.Number, d.State, state.FormatAccess(d.ReadOnly))
	if d.Identity != "" {
		text += ", " + d.Identity
	}
	return fmt.Sprintf("%s (missing %t, mark %t, formatted %q, raw %t, facts unread %t)", text, d.Missing, d.Formatting, d.Formatted, d.Raw, d.Err != nil)
}
