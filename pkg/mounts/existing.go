package mounts

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// createMode says whether a mount may create the file or directory that it is
// attached to.
type createMode bool

const (
	create    createMode = true
	mustExist createMode = false
)

// Existing mounts as its Host does, but only on what is there: no directory and
// no file is made, however soon after a look it was removed.
type Existing struct{ host *Host }

// Existing returns the Existing of a Host.
func (h *Host) Existing() Existing { return Existing{h} }

// MountDevice is that of a Host.
func (e Existing) MountDevice(ctx context.Context, device state.Device, path, fsType string, flags state.Flags, readOnly bool) error {
	return e.host.mountDevice(ctx, device, path, fsType, flags, readOnly, mustExist)
}

// MountSource is that of a Host.
func (e Existing) MountSource(ctx context.Context, source state.Source, path string, flags state.Flags) error {
	return e.host.mountSource(ctx, source, path, flags, mustExist)
}

// BindMount is that of a Host.
func (e Existing) BindMount(ctx context.Context, source string, device state.DeviceNumber, target string, flags state.Flags) error {
	return e.host.bindMount(ctx, source, device, target, flags, mustExist)
}

// BindDevice is that of a Host.
func (e Existing) BindDevice(ctx context.Context, device state.Device, target string) error {
	return e.host.bindDevice(ctx, device, target, mustExist)
}
