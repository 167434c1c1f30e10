package reconciler

import (
	"context"
	"fmt"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// Observe looks at what is there for the paths of a record, which need not be
// in the store. It changes nothing. ctx ends the wait, not a look that hangs.
func (r *Reconciler) Observe(ctx context.Context, want *state.Volume) (state.Actual, error) {
	type result struct {
		have state.Actual
		err  error
	}
	done := make(chan result, 1)
	go func() { // may be lost to a dead file system
		have, err := r.observe(ctx, want)
		done <- result{have, err}
	}()
	select {
	case res := <-done:
		return res.have, res.err
	case <-ctx.Done():
		return state.Actual{}, fmt.Errorf("volume %s: looking at the volume: %w", want.ID, ctx.Err())
	}
}

func (r *Reconciler) observe(ctx context.Context, want *state.Volume) (have state.Actual, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("volume %s: observe: %w", want.ID, err)
		}
	}()
	have.Device, err = r.kernel.Devices.Find(ctx, want.ID)
	switch class := state.ClassOf(err); {
	case err == nil:
	case class == state.InvalidArgument:
		have.Device = state.Device{Missing: true} // no volume can have that id
	case class.Final():
		return have, state.Errorf(state.Unavailable, "%w", err) // nothing could be seen undone
	default:
		return have, err
	}
	device := have.Device.State == state.DeviceAttached || have.Device.State == state.DeviceDetaching
	if device {
		if have.View, err = r.kernel.Views.FindView(ctx, have.Device); err != nil {
			return have, err
		}
	}
	if want.Stage != nil {
		have.Stage = r.look(ctx, want.Stage.Path)
	}
	have.Targets = make(map[string]state.Mountpoint, len(want.Targets))
	for path := range want.Targets {
		have.Targets[path] = r.look(ctx, path)
	}
	if readContents(want, have) {
		mountpoint := ""
		if len(have.Stage.Mounts) > 0 && have.Stage.Mounts[0].Is(have.Device.Number) {
			mountpoint = want.Stage.Path
		}
		if have.Contents, err = r.kernel.Filesystems.Probe(ctx, have.Device, mountpoint); err != nil {
			have.Contents = state.Contents{Err: err}
		}
	}
	leaving := want.Stage != nil && want.Stage.Gone && len(have.Stage.Mounts) == 0
	if d := &have.Device; leaving && d.Holder == "" && (d.Held || d.State == state.DeviceDetaching) {
		d.Holder = r.holders(ctx, *d)
	}
	return have, nil
}

// look keeps what goes wrong at one path from hiding the rest of the volume.
func (r *Reconciler) look(ctx context.Context, path string) state.Mountpoint {
	m, err := r.kernel.Mounts.Look(ctx, path)
	if err != nil {
		return state.Mountpoint{Err: err}
	}
	return m
}

// readContents reports whether the plan depends on what the device holds.
func readContents(want *state.Volume, have state.Actual) bool {
	s := want.Stage
	return have.Device.Attached() && s != nil && !s.Gone && s.Capability.Access == state.MountAccess
}

// holders names who holds a device, for humans.
func (r *Reconciler) holders(ctx context.Context, d state.Device) string {
	if r.kernel.Holders == nil {
		return ""
	}
	return strings.Join(r.kernel.Holders(ctx, d.Number), ", ")
}
