// Package devices is the interface between the reconciler and storage. Each kind of
// storage is a Backend, in a folder of its own, which runs the test suite in
// devicestest. What only some storage can do is an optional interface, found by
// a type assertion. A Set holds the backends of one plugin by name.
//
// Read devices.go first, then kind.go (how a backend is opened) and provision.go.
package devices

import (
	"context"
	"errors"

	"github.com/csi-node/csi-node/pkg/state"
)

// BackendKey is the key of the volume context that names the backend of a volume.
const BackendKey = "backend"

// Volume is what the engine tells a backend about a volume.
type Volume struct {
	ID string
	// Backend is the name of the volume's backend in a Set; empty: not known.
	Backend string
	// Context is the volume context, without what Kubernetes adds to it, and Publish the
	// publish context, as the CO gave them. Both are nil when only the id is known, such as
	// after the loss of the store: Find and Detach must work with the id alone.
	Context map[string]string
	Publish map[string]string
	// Secrets are those that callers have sent since the plugin started. No value may get
	// into any log, error or file.
	Secrets Secrets
}

// Recorded returns the Volume that backends get for a volume with a record.
func Recorded(record *state.Volume) Volume {
	v := Volume{ID: record.ID, Backend: record.Backend}
	if record.Stage != nil {
		v.Context, v.Publish = state.SplitContext(state.WithoutKubernetes(record.Stage.Context))
	}
	return v
}

// ErrNoDevice is what Attach returns, wrapped, when the volume's storage is not on the
// node, or not any more, such as a disk that is not plugged in. The backend need not
// wait for it: the engine calls Attach again when the kernel reports a new block
// device, or a Watcher the volume.
var ErrNoDevice = errors.New("there is no such device on this node")

// Backend attaches volumes. Its methods may be called concurrently; calls for
// different volumes do not wait for each other. They may block for as long as
// the kernel does: ctx ends waiting for a turn, not a system call. With a ctx that has ended
// before, nothing is changed, and its error returned.
type Backend interface {
	// Validate returns InvalidArgument for a volume that the backend can never
	// have: its id, or its contexts. It is pure.
	Validate(Volume) error
	// Find returns the device of the volume. A volume that the backend does not know is
	// absent and Missing; one that is attached though the backend does not know it any more
	// is Missing too, so that it can be taken down. Its cost does not depend on the number
	// of volumes and devices. If the facts cannot be read, Find sets Device.Err and returns
	// no error: a volume is taken down without them.
	Find(ctx context.Context, v Volume) (state.Device, error)
	// Attach attaches the volume, or reclaims a device that is going away; it does nothing
	// if the volume is already attached as asked. NotFound: no such volume.
	// FailedPrecondition: something else uses it, or it is in use in the other mode.
	// ErrNoDevice: its storage is not on the node yet.
	Attach(ctx context.Context, v Volume, readOnly bool) error
	// Detach returns nil only when the device is seen to be gone; an unknown volume has
	// none. A device that is mounted or claimed stays as it is, and an unclassified error
	// names who holds it. The same is true of one under a loop device, such as a read-only
	// view, which does not claim it: Info.Loops of package blockdev tells of those.
	Detach(ctx context.Context, v Volume) error
}

// Grower is a backend whose volumes can be made larger by the node.
type Grower interface {
	// Grow makes the volume, and its device if there is one, at least that many
	// bytes large; it never shrinks them. What it adds reads as zeros; if others make the
	// volumes, it may read otherwise, but never as data of another volume. The engine lets
	// a view over the device grow afterwards. ResourceExhausted: there is no room.
	// NotFound: no such volume. What a context ends is as for a Backend.
	Grow(ctx context.Context, v Volume, bytes int64) error
}

// Formatter keeps the durable facts about formatting with the volume's data. The
// engine keeps them in notes for a backend that has no place for them.
type Formatter interface {
	// BeginFormat sets the mark that says: a format may have been begun. It is
	// durable when BeginFormat returns, and the volume is not Fresh then.
	// FailedPrecondition: a format of the volume was completed before, or it was
	// published raw.
	BeginFormat(ctx context.Context, v Volume) error
	// EndFormat clears the mark and remembers the file system type, durably.
	EndFormat(ctx context.Context, v Volume, fsType string) error
	// BeginRaw notes that the volume is shown as a raw block device which takes
	// writes, before it is. It is durable when BeginRaw returns, and the volume is
	// not Fresh then.
	BeginRaw(ctx context.Context, v Volume) error
}

// Eraser is a backend that has a better way to zero an attached volume than to write
// zeros to its device.
type Eraser interface {
	// Erase makes every byte of the attached volume zero, durably. It fails
	// while anybody else has the device claimed, such as a mkfs that still runs.
	// FailedPrecondition: the volume does not carry the formatting mark.
	Erase(ctx context.Context, v Volume) error
}

// Clearer empties volumes because an operator says so.
type Clearer interface {
	// Unused returns FailedPrecondition, naming who uses it, unless the volume
	// is detached and nobody has its data mounted or claimed. NotFound: no such volume.
	Unused(ctx context.Context, v Volume) error
	// Clear makes every byte of an unused volume zero and forgets that it was
	// ever formatted or published raw, durably. The formatting mark is set meanwhile:
	// a volume on which Clear was interrupted is erased before it is next mounted. A Clear
	// that fails before it has written anything leaves the volume without the mark, or, if
	// the mark is in the Facts, returns state.Unwritten.
	Clear(ctx context.Context, v Volume) error
}

// Owner is a backend that knows its volumes by their id alone.
type Owner interface {
	// Owns reports whether a volume of which only the id is known is this
	// backend's. It looks at no device. A stage and a publish do not ask: they come with
	// the volume context, and without BackendKey there the volume is the default backend's.
	Owns(ctx context.Context, id string) (bool, error)
}

// Lister is a backend that can list all devices that it has made on the node, also in
// earlier runs.
type Lister interface {
	// Attached returns the devices of volumes, in the order of the volumes' ids. It
	// may block for as long as one of the devices does.
	Attached(ctx context.Context) ([]Attachment, error)
}

// Attachment is a device that a backend attached.
type Attachment struct {
	Volume string       // id; empty when the backend has no volume for the device any more
	Device state.Device // as Find returns it
}

// Locator is a backend that knows which volume a device number belongs to.
type Locator interface {
	// VolumeAt returns the id of the volume that the device with the number shows; ""
	// if the device is not the backend's. It does not block on the device.
	VolumeAt(number state.DeviceNumber) string
}

// Checker is a backend that can check the place in which it keeps its volumes.
type Checker interface {
	// Check returns nil when it is there and has room. ResourceExhausted: it is
	// full, or nearly so. state.Degraded: its volumes are served, but one more fault
	// can lose data. Any other error: it is not there, or broken.
	Check(ctx context.Context) error
}

// Watcher is a backend that notices by itself when its volumes change.
type Watcher interface {
	// Watch calls changed with the id of each volume that may have changed, or whose
	// device may have appeared, and with "" for any volume. It returns when ctx ends.
	Watch(ctx context.Context, changed func(id string)) error
}

// Viewer keeps read-only devices over other devices, of whichever backend; package
// blockdev has one.
type Viewer interface {
	// FindView returns the view over a device.
	FindView(ctx context.Context, device state.Device) (state.Device, error)
	// AttachView attaches a view, or reclaims one that is going away; one that is
	// smaller than its device grows.
	AttachView(ctx context.Context, device state.Device) error
	// DetachView detaches a view, by the rules of Detach.
	DetachView(ctx context.Context, device state.Device) error
}

// Holder tells whether devices are in use.
type Holder interface {
	// Held reports whether an attached device, of a backend or a Viewer, is mounted
	// or claimed by somebody, in whatever mount namespace. Asking may disturb somebody
	// who is about to claim it, so only the volume's worker asks.
	Held(ctx context.Context, device state.Device) (bool, error)
}
