package reconciler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"strings"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// growsMounted reports whether a type of file system grows while it is mounted. The others
// grow while they are not.
func growsMounted(fsType string) bool { return fsType == "xfs" }

// fakeFilesystems is mkfs and its kin.
type fakeFilesystems struct{ *process }

func (f fakeFilesystems) Probe(ctx context.Context, device state.Device, mountpoint string) (c state.Contents, err error) {
	id := path.Base(device.Backing)
	err = f.call(ctx, opProbe, id, id, func(bool) error {
		v := f.k.volumes[id]
		switch top := v.top(); {
		case v.layer != nil && v.device != nil && v.device.number == device.Number:
			c = v.shown(v.beneath, device)
			return nil
		case top == nil:
			return fmt.Errorf("no device of %s", id)
		}
		c = v.shown(v.contents, device)
		if c.Kind == state.ContentsFilesystem {
			c.Growable = c.Size < v.top().size
			c.GrowsMounted, c.GrowsUnmounted = growsMounted(c.FSType), !growsMounted(c.FSType)
		}
		return nil
	})
	return c, err
}

// shown is what a look finds where there are such contents.
func (v *fakeVolume) shown(c state.Contents, device state.Device) state.Contents {
	switch {
	case v.zeros:
		return state.Contents{Kind: state.ContentsBlank}
	case v.stamp != "" && v.stamp == device.Trial:
		return state.Contents{Kind: state.ContentsUnproven, Found: "a stamp"}
	case v.stamp != "":
		c = state.Contents{Kind: state.ContentsOther, Found: "half a trial"}
	}
	switch {
	case device.FormatUUID == "" || maybeBlank(c):
	case c.UUID == device.FormatUUID:
		c.Origin = state.OriginFormat
	case strings.HasPrefix(c.Found, "half"):
		c.Origin = state.OriginUnnamed
	default:
		c.Origin = state.OriginOther
	}
	return c
}

// Try leaves the stamp when it is cut short.
func (f fakeFilesystems) Try(ctx context.Context, device state.Device, uuid string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opTry, id, id, func(half bool) error {
		v := f.k.volumes[id]
		switch c := v.shown(*v.lowest(), device); {
		case v.trial != uuid:
			return f.k.refuse(id, "trial of %s, and %q was begun", uuid, v.trial)
		case !maybeBlank(c) || v.zeros:
			return &state.Unwritten{Err: fmt.Errorf("it keeps nothing, or holds %v", c.Kind)}
		case half:
			v.stamp = uuid
		}
		return f.k.exclusive(id, "try")
	})
}

// Format makes a file system of the UUID that last returns, if there is one.
func (f fakeFilesystems) Format(ctx context.Context, device state.Device, fsType string, last func(context.Context) (string, error)) error {
	if last == nil {
		return f.format(ctx, device, fsType)
	}
	var blank bool
	f.k.with(func() {
		blank = maybeBlank(f.k.volumes[path.Base(device.Backing)].shown(f.k.volumes[path.Base(device.Backing)].contents, device))
	})
	if !blank {
		return &state.Unwritten{Err: state.Errorf(state.FailedPrecondition, "only a blank device is formatted")}
	}
	uuid, err := last(ctx)
	if err != nil {
		return err
	}
	device.FormatUUID = uuid
	return f.format(ctx, device, fsType)
}

func (f fakeFilesystems) Prove(ctx context.Context, device state.Device) error {
	id := path.Base(device.Backing)
	state.Progress(ctx, "proving that it is blank: none read")
	var endless bool
	for f.k.with(func() { endless = f.k.endless }); endless; {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
			state.Progress(ctx, "proving that it is blank: some read")
		}
	}
	return f.call(ctx, opProve, id, id, func(bool) error {
		v := f.k.volumes[id]
		if v.stamp != "" && v.stamp == device.Trial {
			v.stamp = ""
		}
		if kind := v.shown(*v.lowest(), device).Kind; kind != state.ContentsBlank && kind != state.ContentsUnproven {
			if f.k.drifted[id].n > f.k.probed[id].n { // the look right before a proof is not at this
				return state.Errorf(state.Unavailable, "it is %v by now", kind)
			}
			return f.k.refuse(id, "proof of %v", kind)
		}
		return nil
	})
}

func (f fakeFilesystems) Smallest(string) int64 { return 0 }

func (f fakeFilesystems) format(ctx context.Context, device state.Device, fsType string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opFormat, id, id, func(half bool) error {
		v := f.k.volumes[id]
		if v.zeros {
			return &state.Unwritten{Err: errors.New("mkfs reported success, and there is no file system on the device")}
		}
		blank := v.contents.Kind == state.ContentsBlank || v.contents.Kind == state.ContentsUnproven && device.Fresh
		if !v.marked() || !blank || v.data {
			return f.k.refuse(id, "format of %v, mark %t", v.contents.Kind, v.marked())
		}
		if err := f.k.exclusive(id, "format"); err != nil {
			return err
		}
		if half {
			v.contents = state.Contents{Kind: state.ContentsOther, Found: "half of " + fsType}
			return nil
		}
		f.k.formats++
		v.contents = state.Contents{Kind: state.ContentsFilesystem, FSType: fsType, UUID: cmp.Or(device.FormatUUID, fmt.Sprintf("uuid-%d", f.k.formats)), Size: v.top().size}
		return nil
	})
}

func (f fakeFilesystems) Check(ctx context.Context, device state.Device, fsType string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opCheck, id, id, func(half bool) error {
		v := f.k.volumes[id]
		if err := f.k.exclusive(id, "check"); err != nil {
			return err
		}
		v.contents.NeedsCheck = half
		return nil
	})
}

func (f fakeFilesystems) Grow(ctx context.Context, device state.Device, fsType, mountpoint string) error {
	id := path.Base(device.Backing)
	return f.call(ctx, opGrow, id, id, func(half bool) error {
		v := f.k.volumes[id]
		switch {
		case (mountpoint != "") != growsMounted(fsType):
			return f.k.refuse(id, "%s cannot grow at %q", fsType, mountpoint)
		case mountpoint == "":
			if err := f.k.exclusive(id, "grow"); err != nil {
				return err
			}
		case len(f.k.mounts[mountpoint]) == 0 || f.k.mounts[mountpoint][0].volume != id || f.k.mounts[mountpoint][0].SuperReadOnly:
			return f.k.refuse(id, "grow at %s, where it is not mounted for writing", mountpoint)
		}
		if half {
			v.contents.Size += (v.top().size - v.contents.Size) / 2
			return nil
		}
		v.contents.Size = v.top().size
		return nil
	})
}

// Default is xfs for what nobody has formatted or asked a type of.
func (f fakeFilesystems) Default(int64) string { return "xfs" }
