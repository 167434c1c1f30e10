package reconciler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// beginFormat proves the volume's source blank, and sets the mark by which what a format
// leaves there is known.
func (r *Reconciler) beginFormat(ctx context.Context, want *state.Volume, have *state.Actual) error {
	if err := r.kernel.Filesystems.Prove(ctx, have.Lowest()); err != nil {
		return err
	}
	if have.Lowest().Noted {
		return nil // the mark comes right before the format
	}
	return r.kernel.Devices.BeginFormat(ctx, r.spec(want))
}

// format makes the file system of a volume, and ends the mark.
func (r *Reconciler) format(ctx context.Context, layer string, want *state.Volume, have *state.Actual) error {
	fsType := want.Stage.Capability.FSType
	// If an observation did not read all of the device, the step before has proved
	// it blank, or it may hold the remains of an interrupted format; or what others have
	// put there, and then Format refuses it. Noise is nobody's data, as long as the
	// device is stamped new.
	d := sourceFresh(have.Layer, have.Device)
	if have.Contents.Kind != state.ContentsBlank && !d.Fresh && !d.Noise && !d.StaleMark && !d.Proved {
		if err := r.erase(ctx, layer, want, have); err != nil {
			return err
		}
		d.Fresh = have.Layer != "" // every byte of it is zero now
	}
	var last func(context.Context) (string, error)
	if d.Noted {
		last = func(ctx context.Context) (string, error) { return r.tryFormat(ctx, want, d) }
	}
	switch err := r.kernel.Filesystems.Format(ctx, d, fsType, last); {
	case err != nil && layer == "":
		return r.abandonUnlessWritten(ctx, want, err)
	case err != nil:
		return err
	}
	return r.endFormat(ctx, layer, want, have, fsType)
}

// createLayer makes a layer on the element beneath, which then counts as formatted.
func (r *Reconciler) createLayer(ctx context.Context, step Step, want *state.Volume, have *state.Actual) error {
	l, lower, err := r.layerOf(have, step.Layer)
	if err != nil {
		return err
	}
	v, beneath := r.spec(want), have.Stack()[indexOf(have, step.Layer)-1].Layer
	if have.Beneath.Kind == state.ContentsUnproven && !lower.Proved && !sourceFresh(beneath, lower).Fresh { // as for Format
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
func (r *Reconciler) abandonFormat(ctx context.Context, want *state.Volume, have *state.Actual) error {
	klog.FromContext(ctx).Info("A format was begun, and the device holds something else, which is left as it is", "found", have.Contents.Found+have.Beneath.Found)
	if have.Layer == "" && have.Contents.Kind == state.ContentsFilesystem {
		return r.kernel.Devices.EndFormat(ctx, r.spec(want), have.Contents.FSType)
	}
	return r.kernel.Devices.AbandonFormat(ctx, r.spec(want))
}

// leaveData is what becomes of an Erase when nothing was written since the device was proved
// blank and marked: what has turned up there is left as it is.
func (r *Reconciler) leaveData(ctx context.Context, _ Step, want *state.Volume, have *state.Actual) error {
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
	if !errors.As(err, new(*state.Unwritten)) {
		return err
	}
	ctx, stop := outlast(ctx, abandonTime)
	defer stop()
	if abandoned := r.kernel.Devices.AbandonFormat(ctx, r.spec(want)); abandoned != nil {
		return fmt.Errorf("%v, and the mark stays that allows to erase it: %w", err, abandoned) // so nothing is tried again at once
	}
	return err
}

// abandonTime is how long a mark may still be taken back once the plugin stops.
const abandonTime = 5 * time.Second

// outlast returns a context that ends that much later than ctx.
func outlast(ctx context.Context, by time.Duration) (later context.Context, stop func()) {
	later, cancel := context.WithCancel(context.WithoutCancel(ctx))
	ended := context.AfterFunc(ctx, func() { time.AfterFunc(by, cancel) })
	return later, func() { ended(); cancel() }
}

// erase zeroes the element of a layer, or the source.
func (r *Reconciler) erase(ctx context.Context, layer string, want *state.Volume, have *state.Actual) error {
	if layer != "" {
		return r.onLayer(ctx, Step{Action: Erase, Layer: layer}, want, have)
	}
	return r.kernel.Devices.Erase(ctx, r.spec(want))
}

// endFormat clears the mark of the element of a layer, or of the source.
func (r *Reconciler) endFormat(ctx context.Context, layer string, want *state.Volume, have *state.Actual, as string) error {
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
func (r *Reconciler) markRaw(ctx context.Context, want *state.Volume, have *state.Actual) error {
	if err := r.kernel.Devices.BeginRaw(ctx, r.spec(want)); err != nil || have.Layer == "" || !have.Device.Fresh {
		return err
	}
	return r.endFormat(ctx, have.Layer, want, have, "")
}
