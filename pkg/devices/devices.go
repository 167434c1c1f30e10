// Package devices connects a volume to the node as a block device. Each backend
// has a folder of its own and runs the suite in devicestest.
package devices

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Backend attaches volumes. Its methods may be called concurrently; calls for
// different volumes do not wait for each other. They may block for as long as
// the kernel does: ctx ends waiting for a turn, not a system call. An id that
// no volume can have is InvalidArgument.
type Backend interface {
	// Find tells what stands for the volume. A volume that the backend does
	// not know is absent and Missing; one that is attached and unknown by now is
	// Missing too, so that it can be taken down. It is O(1) in the number of
	// volumes and devices.
	// Facts that cannot be read are Device.Err, and no error of Find: a volume is
	// taken down without them.
	Find(ctx context.Context, volume string) (state.Device, error)
	// Held reports whether a device that stands, one of Find's or a Viewer's, is
	// mounted or claimed by somebody, in whatever mount namespace. Asking may
	// disturb who is about to claim it, so only the volume's worker asks.
	Held(ctx context.Context, device state.Device) (bool, error)
	// Attach attaches the volume, or reclaims a device that is going away; it
	// does nothing if the volume is attached so already. NotFound: no such
	// volume. FailedPrecondition: something else uses it, or it is in use in
	// the other mode.
	Attach(ctx context.Context, volume string, readOnly bool) error
	// Detach returns nil only when the device is seen to be gone, as that of
	// an unknown volume is. A device that is mounted or claimed stays as it is;
	// an unclassified error names who holds it.
	Detach(ctx context.Context, volume string) error
	// Grow makes the volume, and its device if there is one, at least that many
	// bytes large; it never shrinks them. ResourceExhausted: there is no room.
	// NotFound: no such volume.
	Grow(ctx context.Context, volume string, bytes int64) error
}

// Formatter keeps the durable facts about formatting with the volume's data.
type Formatter interface {
	// BeginFormat sets the mark that says: a format may have been begun. It is
	// durable when BeginFormat returns, and the volume is not Fresh then.
	// FailedPrecondition: a format of the volume was completed before, or it was
	// published raw.
	BeginFormat(ctx context.Context, volume string) error
	// Erase makes every byte of the attached volume zero, durably. It fails
	// while anybody else has the device claimed, as a mkfs that lives on has.
	// FailedPrecondition: the volume does not carry the mark.
	Erase(ctx context.Context, volume string) error
	// EndFormat clears the mark and remembers the file system type, durably.
	EndFormat(ctx context.Context, volume, fsType string) error
	// BeginRaw notes that the volume is shown as a raw block device which takes
	// writes, before it is. It is durable when BeginRaw returns, and the volume is
	// not Fresh then.
	BeginRaw(ctx context.Context, volume string) error
}

// Clearer empties volumes because an operator says so.
type Clearer interface {
	// Unused returns FailedPrecondition, naming who uses it, unless the volume
	// is detached and nobody has its data open. NotFound: no such volume.
	Unused(ctx context.Context, volume string) error
	// Clear makes every byte of an unused volume zero and forgets that it was
	// ever formatted or published raw, durably. The formatting mark stands meanwhile: a volume on
	// which Clear was interrupted is erased before it is next mounted.
	Clear(ctx context.Context, volume string) error
}

// Viewer keeps read-only devices over other devices. Grow grows a view with its
// device; while a view lags behind, Find tells the size of the view.
type Viewer interface {
	// FindView tells what view stands over a device.
	FindView(ctx context.Context, device state.Device) (state.Device, error)
	// AttachView attaches a view, or reclaims one that is going away; it does
	// nothing if there is one.
	AttachView(ctx context.Context, device state.Device) error
	// DetachView is to a view what Detach is to a volume.
	DetachView(ctx context.Context, device state.Device) error
}
