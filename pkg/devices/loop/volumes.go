package loop

import (
	"context"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// Volumes is a Backend as package devices has them: all that a pool needs to
// know of a volume is its id.
type Volumes struct{ *Backend }

// Validate returns InvalidArgument for an id that no volume can have.
func (b Volumes) Validate(v devices.Volume) error { return pool.ValidateID(v.ID) }

// Find implements devices.Backend.
func (b Volumes) Find(ctx context.Context, v devices.Volume) (state.Device, error) {
	return b.Backend.Find(ctx, v.ID)
}

// Attach implements devices.Backend.
func (b Volumes) Attach(ctx context.Context, v devices.Volume, readOnly bool) error {
	return b.Backend.Attach(ctx, v.ID, readOnly)
}

// Detach implements devices.Backend.
func (b Volumes) Detach(ctx context.Context, v devices.Volume) error {
	return b.Backend.Detach(ctx, v.ID)
}

// Grow implements devices.Grower.
func (b Volumes) Grow(ctx context.Context, v devices.Volume, bytes int64) error {
	return b.Backend.Grow(ctx, v.ID, bytes)
}

// BeginFormat implements devices.Formatter.
func (b Volumes) BeginFormat(ctx context.Context, v devices.Volume) error {
	return b.Backend.BeginFormat(ctx, v.ID)
}

// EndFormat implements devices.Formatter.
func (b Volumes) EndFormat(ctx context.Context, v devices.Volume, fsType string) error {
	return b.Backend.EndFormat(ctx, v.ID, fsType)
}

// BeginRaw implements devices.Formatter.
func (b Volumes) BeginRaw(ctx context.Context, v devices.Volume) error {
	return b.Backend.BeginRaw(ctx, v.ID)
}

// Erase implements devices.Eraser.
func (b Volumes) Erase(ctx context.Context, v devices.Volume) error {
	return b.Backend.Erase(ctx, v.ID)
}

// Unused implements devices.Clearer.
func (b Volumes) Unused(ctx context.Context, v devices.Volume) error {
	return b.Backend.Unused(ctx, v.ID)
}

// Clear implements devices.Clearer.
func (b Volumes) Clear(ctx context.Context, v devices.Volume) error {
	return b.Backend.Clear(ctx, v.ID)
}
