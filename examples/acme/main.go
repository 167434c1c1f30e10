// Command acme is a whole CSI driver for a made-up storage array, to begin one's
// own with: see docs/backends.md. The array is a directory that Acme's own daemon
// mounts on the node. Each volume there is a directory of the name of its id: "serial",
// which no other volume ever has, and "lun", its bytes, of which a loop device is made.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

func main() { driver.Main(options()) }

func options() driver.Options {
	return driver.Options{Name: "csi.acme.example", Program: "acme", Version: "v1.0.0", Backends: []devices.Kind{arrayKind()}}
}

// arrayKind is the one sort of storage that the driver has.
func arrayKind() devices.Kind {
	a := &array{}
	return devices.Kind{
		Name:       "array",
		Properties: devices.Properties{NodeLocal: true},
		Flags: func(f *pflag.FlagSet) {
			f.StringVar(&a.dir, "array-dir", "/mnt/acme", "where the array is mounted")
			f.StringVar(&a.name, "array-name", "acme", "which of Acme's arrays it is")
		},
		Open: func(_ context.Context, env devices.Environment) (devices.Backend, error) {
			return &array{dir: a.dir, name: a.name, loops: env.Loops}, nil
		},
	}
}

// array is the backend. What stands it asks the kernel; the engine notes what was formatted.
type array struct {
	dir, name string
	loops     *loop.Devices
	turns     sync.Map // by id: channels with room for the one that changes the volume
}

var validID = regexp.MustCompile(`^[a-z0-9][-a-z0-9]{0,39}$`)

// Validate is pure: it knows which ids and contexts a volume can never have.
func (*array) Validate(v devices.Volume) error {
	if !validID.MatchString(v.ID) {
		return state.Errorf(state.InvalidArgument, "volume %.200q: no volume of the array has such an id", v.ID)
	}
	return nil
}

// look says which loop device is the volume's: the one with its tag, over its lun if any.
func (a *array) look(id string) (t loop.Target, err error) {
	if err := a.Validate(devices.Volume{ID: id}); err != nil {
		return t, err
	}
	t = loop.Target{Tag: loop.Tag(a.name, id), Path: filepath.Join(a.dir, id, "lun"), Place: "/" + id + "/"}
	t.File, err = loop.StatFile(t.Path)
	return t, err
}

// Find tells of the volume and its device. A volume is taken down without what is Err.
func (a *array) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	target, err := a.look(v.ID)
	if state.ClassOf(err) == state.InvalidArgument {
		return state.Device{}, err
	}
	lun := target.File
	facts := state.Device{State: state.DeviceAbsent, Backing: target.Path, Missing: err == nil && lun == nil, Err: err}
	if lun != nil {
		serial, err := os.ReadFile(filepath.Join(a.dir, v.ID, "serial"))
		facts.Identity, facts.Size, facts.Err = strings.TrimSpace(string(serial)), lun.Bytes, err
	}
	d, err := a.loops.Recall(ctx, target)
	switch {
	case err != nil:
		return state.Device{}, fmt.Errorf("volume %s: find: %w", v.ID, err)
	case d != nil && !target.Owns(d):
		facts.State, facts.Holder = state.DeviceForeign, d.String()
	case d != nil:
		d.Facts(&facts)
		facts.Missing = facts.Missing || lun != nil && d.File() != lun.ID // it was replaced meanwhile
	}
	return facts, nil
}

// change calls do in the volume's turn.
func (a *array) change(ctx context.Context, id, what string, do func(loop.Target) error) error {
	room, _ := a.turns.LoadOrStore(id, make(chan struct{}, 1))
	select {
	case room.(chan struct{}) <- struct{}{}:
		defer func() { <-room.(chan struct{}) }()
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	target, err := a.look(id)
	if what == "detach" && target.Tag != "" { // the array may be away: the tag is enough
		target.File, err = nil, nil
	} else if err == nil && target.File == nil {
		err = state.Errorf(state.NotFound, "the array has no such volume")
	}
	if err == nil {
		err = do(target)
	}
	if err != nil {
		return fmt.Errorf("volume %s: %s: %w", id, what, err)
	}
	return nil
}

// Attach makes the device, or does nothing if it stands so already.
func (a *array) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	return a.change(ctx, v.ID, "attach", func(t loop.Target) error {
		mode := map[bool]int{false: os.O_RDWR, true: os.O_RDONLY}[readOnly]
		return a.loops.Attach(ctx, loop.Request{
			Target: t, Shape: loop.Shape{ReadOnly: readOnly, Sector: 512}, Volume: v.ID,
			Open: func() (*os.File, error) { return loop.OpenFile(t.Path, t.File.ID, mode) },
		})
	})
}

// Detach returns nil when the device is seen to be gone.
func (a *array) Detach(ctx context.Context, v devices.Volume) error {
	return a.change(ctx, v.ID, "detach", func(t loop.Target) error { return a.loops.Detach(ctx, t) })
}

// Grow makes the array a devices.Grower: NodeExpandVolume works.
func (a *array) Grow(ctx context.Context, v devices.Volume, bytes int64) error {
	return a.change(ctx, v.ID, "grow", func(t loop.Target) error {
		if t.File.Bytes < bytes {
			if err := os.Truncate(t.Path, bytes); err != nil {
				return state.Errorf(state.ResourceExhausted, "%w", err)
			}
		}
		return a.loops.Grow(ctx, t, bytes)
	})
}
