package driver

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/mounts"
	"github.com/csi-node/csi-node/pkg/state"
)

// fakeMajor is the major number of the devices. No real device has it, because the
// mounts of the machine are looked at, too.
const fakeMajor = 4095

// fakeNode is a pool and a kernel in memory, on which every step works at once.
type fakeNode struct {
	*mounts.Host // answers for paths

	mu      sync.Mutex
	volumes map[string]*fakeVolume
	mounts  map[string][]state.Mount // by path, the top first
	files   map[string]state.FileType
	minors  uint32
}

type fakeVolume struct {
	pool.Volume
	device, view state.Device
	used         int64 // bytes that its file system spans
}

const room = 1 << 40 // bytes

// newFakeNode returns an empty node. The host, which answers for paths, may be nil.
func newFakeNode(host *mounts.Host) *fakeNode {
	return &fakeNode{Host: host, volumes: map[string]*fakeVolume{}, mounts: map[string][]state.Mount{}, files: map[string]state.FileType{}}
}

// clone returns a copy of the node that is independent of it.
func (f *fakeNode) clone() *fakeNode {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := newFakeNode(f.Host)
	c.files, c.minors = maps.Clone(f.files), f.minors
	for id, v := range f.volumes {
		own := *v
		c.volumes[id] = &own
	}
	for path, stack := range f.mounts {
		c.mounts[path] = slices.Clone(stack)
	}
	return c
}

func (f *fakeNode) locked(id string, act func(*fakeVolume) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := f.volumes[id]
	if v == nil {
		return state.Errorf(state.NotFound, "volume %s: there is no such volume", id)
	}
	return act(v)
}

// what prints everything that is on the node, in order.
func (f *fakeNode) what() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	text := fmt.Sprintf("%+v %+v\n", f.mounts, f.files)
	for _, id := range slices.Sorted(maps.Keys(f.volumes)) {
		text += fmt.Sprintf("%+v\n", *f.volumes[id])
	}
	return text
}

// The pool.

func (f *fakeNode) Create(_ context.Context, v pool.Volume) (pool.Volume, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if v.Bytes > room {
		return pool.Volume{}, state.Errorf(state.ResourceExhausted, "volume %s: no room", v.ID)
	}
	switch have := f.volumes[v.ID]; {
	case have == nil:
	case have.Ephemeral != nil && v.Ephemeral != nil && *have.Ephemeral == *v.Ephemeral:
		return have.Volume, nil
	default:
		return have.Volume, state.Errorf(state.AlreadyExists, "volume %s: it exists", v.ID)
	}
	f.volumes[v.ID] = &fakeVolume{Volume: v}
	return v, nil
}

func (f *fakeNode) Get(_ context.Context, id string) (v pool.Volume, err error) {
	err = f.locked(id, func(have *fakeVolume) error { v = have.Volume; return nil })
	return v, err
}

func (f *fakeNode) IDs(context.Context) ([]string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.Sorted(maps.Keys(f.volumes)), nil
}

func (f *fakeNode) Capacity(context.Context) (pool.Capacity, error) {
	return pool.Capacity{Total: room, Available: room, Largest: room}, nil
}

func (f *fakeNode) Delete(_ context.Context, id string) error {
	return f.locked(id, func(v *fakeVolume) error {
		if v.device.Attached() {
			return state.Errorf(state.FailedPrecondition, "volume %s: in use", id)
		}
		delete(f.volumes, id)
		return nil
	})
}

// What the node makes.

func (f *fakeNode) Types() []string       { return []string{"ext4", "xfs"} }
func (f *fakeNode) Default(int64) string  { return "ext4" }
func (f *fakeNode) Smallest(string) int64 { return 2 << 20 }

// Devices.

func (f *fakeNode) Find(_ context.Context, volume devices.Volume) (d state.Device, err error) {
	if err := pool.ValidateID(volume.ID); err != nil {
		return d, err
	}
	err = f.locked(volume.ID, func(v *fakeVolume) error {
		d = orAbsent(v.device)
		d.Size, d.Capacity, d.Formatting, d.Formatted, d.Raw = v.Bytes, v.Bytes, v.Formatting, v.Formatted, v.Raw
		return nil
	})
	if err != nil {
		return state.Device{State: state.DeviceAbsent, Missing: true}, nil
	}
	return d, nil
}

// orAbsent is what Find returns for a device, also for an absent one.
func orAbsent(d state.Device) state.Device {
	if d.State == state.DeviceUnknown {
		d.State = state.DeviceAbsent
	}
	return d
}

func (f *fakeNode) Held(_ context.Context, d state.Device) (bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, stack := range f.mounts {
		if slices.ContainsFunc(stack, func(m state.Mount) bool { return !m.Node && m.Device == d.Number }) {
			return true, nil
		}
	}
	return false, nil
}

func (f *fakeNode) attached(size int64, readOnly bool) state.Device {
	f.minors++
	return state.Device{State: state.DeviceAttached, Path: fmt.Sprintf("/dev/fake%d", f.minors), Number: state.DeviceNumber{Major: fakeMajor, Minor: f.minors}, Size: size, ReadOnly: readOnly}
}

func (f *fakeNode) Attach(_ context.Context, volume devices.Volume, readOnly bool) error {
	return f.locked(volume.ID, func(v *fakeVolume) error { v.device = f.attached(v.Bytes, readOnly); return nil })
}

func (f *fakeNode) Detach(_ context.Context, volume devices.Volume) error {
	return f.locked(volume.ID, func(v *fakeVolume) error { v.device = state.Device{}; return nil })
}

func (f *fakeNode) byDevice(d state.Device, act func(*fakeVolume) error) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, v := range f.volumes {
		if v.device.Number == d.Number {
			return act(v)
		}
	}
	return fmt.Errorf("no device %s", d.Number)
}

func (f *fakeNode) FindView(_ context.Context, d state.Device) (view state.Device, err error) {
	err = f.byDevice(d, func(v *fakeVolume) error { view = orAbsent(v.view); return nil })
	return view, err
}

func (f *fakeNode) AttachView(_ context.Context, d state.Device) error {
	return f.byDevice(d, func(v *fakeVolume) error { v.view = f.attached(v.Bytes, true); return nil })
}

func (f *fakeNode) DetachView(_ context.Context, d state.Device) error {
	return f.byDevice(d, func(v *fakeVolume) error { v.view = state.Device{}; return nil })
}

func (f *fakeNode) BeginFormat(_ context.Context, volume devices.Volume) error {
	return f.locked(volume.ID, func(v *fakeVolume) error { v.Formatting = true; return nil })
}

func (f *fakeNode) BeginRaw(_ context.Context, volume devices.Volume) error {
	return f.locked(volume.ID, func(v *fakeVolume) error { v.Raw = true; return nil })
}

func (f *fakeNode) Erase(context.Context, devices.Volume) error { return nil }

func (f *fakeNode) TryFormat(context.Context, devices.Volume) (string, error) { return "", nil }

func (f *fakeNode) AbandonFormat(context.Context, devices.Volume) error { return nil }

func (f *fakeNode) EndFormat(_ context.Context, volume devices.Volume, fsType string) error {
	return f.locked(volume.ID, func(v *fakeVolume) error { v.Formatting, v.Formatted, v.used = false, fsType, v.Bytes; return nil })
}

// Validate accepts any id.
func (f *fakeNode) Validate(devices.Volume) error { return nil }

// fakeBackend and fakeFilesystems are the two whose methods have the same name.
type fakeBackend struct{ *fakeNode }

// fakeProvisioner is a fakeBackend that creates volumes.
type fakeProvisioner struct {
	fakeBackend
	pool.Provisioner
}

func (f fakeBackend) Grow(_ context.Context, volume devices.Volume, bytes int64) error {
	return f.locked(volume.ID, func(v *fakeVolume) error { v.Bytes = max(v.Bytes, bytes); return nil })
}

type fakeFilesystems struct{ *fakeNode }

func (f fakeFilesystems) Probe(_ context.Context, d state.Device, _ string) (c state.Contents, err error) {
	err = f.byDevice(d, func(v *fakeVolume) error {
		c = state.Contents{Kind: state.ContentsBlank}
		if v.Formatted != "" {
			c = state.Contents{Kind: state.ContentsFilesystem, FSType: v.Formatted, Size: v.used, Growable: v.used < v.Bytes, GrowsMounted: true}
		}
		return nil
	})
	return c, err
}

func (f fakeFilesystems) Prove(context.Context, state.Device) error { return nil }
func (f fakeFilesystems) Smallest(string) int64                     { return 0 }
func (f fakeFilesystems) Options(m state.Mount) string              { return m.Options }
func (f fakeFilesystems) Format(context.Context, state.Device, string, func(context.Context) (string, error)) error {
	return nil
}
func (f fakeFilesystems) Try(context.Context, state.Device, string) error   { return nil }
func (f fakeFilesystems) Check(context.Context, state.Device, string) error { return nil }
func (f fakeFilesystems) Grow(_ context.Context, d state.Device, _, _ string) error {
	return f.byDevice(d, func(v *fakeVolume) error { v.used = v.Bytes; return nil })
}

// Mounts.

func (*fakeNode) Spell(_ context.Context, path string) (string, error) { return path, nil }

func (*fakeNode) Above(string) (m state.Mount, point string, err error) { return m, "", nil }

func (f *fakeNode) Usage(ctx context.Context, path string) (state.Mount, state.Usage, error) {
	at, err := f.Look(ctx, path, hang.NoLimit)
	switch {
	case err != nil:
		return state.Mount{}, state.Usage{}, err
	case len(at.Mounts) == 0:
		return state.Mount{}, state.Usage{}, state.Errorf(state.NotFound, "%s is no mount point", path)
	}
	return at.Mounts[0], state.Usage{Bytes: state.Amount{Total: 10, Used: 7, Available: 3}, Inodes: state.Amount{Total: 6, Used: 1, Available: 5}}, nil
}

func (f *fakeNode) Look(_ context.Context, path string, _ time.Duration) (state.Mountpoint, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := state.Mountpoint{File: f.files[path], Mounts: slices.Clone(f.mounts[path])}
	if m.File == state.UnknownFile {
		m.File = state.NoFile
	}
	m.Empty = m.File != state.NoFile && len(m.Mounts) == 0
	return m, nil
}

func (f *fakeNode) push(path string, kind state.FileType, m state.Mount) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.files[path] = kind
	f.mounts[path] = append([]state.Mount{m}, f.mounts[path]...)
	return nil
}

func (f *fakeNode) MountDevice(_ context.Context, d state.Device, path, fsType string, flags state.Flags, readOnly bool) error {
	if slices.Contains(flags.Super, "refused") {
		return state.Errorf(state.InvalidArgument, "the kernel refuses the option refused")
	}
	return f.push(path, state.Directory, state.Mount{Device: d.Number, FSType: fsType, Root: "/", Attributes: flags.Set, SuperReadOnly: readOnly})
}

func (f *fakeNode) BindMount(_ context.Context, source string, d state.DeviceNumber, target string, flags state.Flags) error {
	return f.push(target, state.Directory, state.Mount{Device: d, FSType: "bound from " + source, Root: "/", Attributes: flags.Set})
}

func (f *fakeNode) BindDevice(_ context.Context, d state.Device, target string) error {
	return f.push(target, state.RegularFile, state.Mount{Device: d.Number, Node: true, FSType: "devtmpfs", Root: "/fake"})
}

func (f *fakeNode) SetAttributes(_ context.Context, path string, flags state.Flags) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := &f.mounts[path][0]
	m.Attributes = m.Attributes&^flags.Clear | flags.Set
	return nil
}

func (f *fakeNode) Unmount(_ context.Context, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.mounts[path] = f.mounts[path][1:]; len(f.mounts[path]) == 0 {
		delete(f.mounts, path)
	}
	return nil
}

func (f *fakeNode) Remove(_ context.Context, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.files, path)
	return nil
}

func (f *fakeNode) Renew(context.Context, string) error { return nil }
