package devices

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Layer makes a device out of another one, as an encryption does. A volume's
// device is a stack: the backend's, which is the source, then a device for each
// layer that the volume wants. The top is formatted, mounted and shown.
//
// The engine opens and grows from the source up, and closes from the top down. Its
// calls for one volume never overlap. What blocks, and what a context ends, is as
// for a Backend. v may be without contexts, as after the loss of the store: Find
// and Close must do with the id then.
type Layer interface {
	// Name is what steps, errors and the facts about formatting call the layer.
	// It never changes.
	Name() string
	// Wanted reports whether the volume has the layer. It is pure.
	Wanted(v Volume) bool
	// Find tells what stands of the layer. It is O(1) in the number of volumes.
	//
	// Of an attached lower element it tells whether that bears the layer (else
	// Device.Unmade), and whether the layer is Fresh: stamped new, as Create does.
	// The state is of the layer's own device; Capacity is how many bytes that
	// can have on the lower element as it is now. A device that bears the
	// volume's name and stands on another element than lower is foreign and
	// Stray, also when lower is not attached.
	Find(ctx context.Context, lower state.Device, v Volume) (state.Device, error)
	// Create makes the layer on a lower element that was proven blank and bears a
	// mark that says so, and stamps it new, durably. It does nothing if there is a
	// layer that is stamped new. When it is interrupted, what is there is Unmade,
	// or a layer that is stamped new.
	Create(ctx context.Context, lower state.Device, v Volume) error
	// Open makes the layer's device, or reclaims one that is going away; it does
	// nothing if it stands so already. Unauthenticated: v.Secrets lack the key, or
	// it is the wrong one.
	Open(ctx context.Context, lower state.Device, v Volume, readOnly bool) error
	// Close takes the layer's device away, also one that is Stray. nil means that
	// it was seen to be gone. A device that is mounted or claimed stays as it is.
	Close(ctx context.Context, lower state.Device, v Volume) error
	// Grow lets the layer's device, which stands, fill the lower element.
	Grow(ctx context.Context, lower state.Device, v Volume) error
	// Erase makes every byte of the layer's device, which stands and is stamped
	// new, zero, durably. FailedPrecondition: it is not stamped.
	Erase(ctx context.Context, lower state.Device, v Volume) error
	// Used takes the stamp away, durably: there is data on the layer from now on.
	Used(ctx context.Context, lower state.Device, v Volume) error
}
