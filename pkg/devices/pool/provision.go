package pool

import (
	"context"
	"errors"
	"fmt"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Provisioner makes and deletes volumes of a pool as package devices asks for
// them: it is a devices.Provisioner and a devices.Inliner.
type Provisioner struct {
	Volumes Volumes
	// Delete deletes a volume that nothing is attached to, as Pool.Delete does which
	// does not look. FailedPrecondition: something is.
	Delete func(ctx context.Context, id string) error
}

// Volumes keeps the volumes; *Pool does.
type Volumes interface {
	// Create returns AlreadyExists together with the volume that is there.
	Create(ctx context.Context, v Volume) (Volume, error)
	Get(ctx context.Context, id string) (Volume, error)
	IDs(ctx context.Context) ([]string, error)
	Capacity(ctx context.Context) (Capacity, error)
}

// CheckParameters implements devices.Provisioner.
func (p Provisioner) CheckParameters(parameters map[string]string) (map[string]string, error) {
	v, err := parse(parameters)
	if err != nil {
		return nil, err
	}
	return parametersOf(v), nil
}

// CreateVolume implements devices.Provisioner.
func (p Provisioner) CreateVolume(ctx context.Context, r devices.CreateRequest) (devices.Provisioned, error) {
	v, err := parse(r.Parameters)
	if err == nil {
		v.Bytes, err = r.Size.Choose(blockSize)
	}
	if err != nil {
		return devices.Provisioned{}, fmt.Errorf("volume %s: %w", r.Name, err)
	}
	v.ID, v.Name, v.FSType, v.Layers = ID(r.Name), r.Name, r.Use.FSType, r.Layers
	v, err = p.Volumes.Create(ctx, v)
	if err != nil && state.ClassOf(err) != state.AlreadyExists {
		return devices.Provisioned{}, err
	}
	return provisioned(v), nil
}

func provisioned(v Volume) devices.Provisioned {
	return devices.Provisioned{ID: v.ID, Name: v.Name, Bytes: v.Bytes, Use: devices.Use{Block: v.FSType == "", FSType: v.FSType}, Parameters: parametersOf(v), Context: v.Layers}
}

// DeleteVolume implements devices.Provisioner and devices.Inliner.
func (p Provisioner) DeleteVolume(ctx context.Context, v devices.Volume) error {
	return p.Delete(ctx, v.ID)
}

// GetVolume implements devices.Provisioner.
func (p Provisioner) GetVolume(ctx context.Context, v devices.Volume) (devices.Provisioned, error) {
	have, err := p.Volumes.Get(ctx, v.ID)
	if err != nil {
		return devices.Provisioned{}, err
	}
	return provisioned(have), nil
}

// ListVolumes implements devices.Provisioner.
func (p Provisioner) ListVolumes(ctx context.Context) ([]string, error) { return p.Volumes.IDs(ctx) }

// GetCapacity implements devices.Provisioner: what is free and not promised, times
// the overcommit that the parameters ask for; none while the pool is not here. An error would
// leave the room told that was told last, and pods be sent to it.
func (p Provisioner) GetCapacity(ctx context.Context, parameters map[string]string) (devices.Capacity, error) {
	v, err := parse(parameters)
	if err != nil {
		return devices.Capacity{}, err
	}
	c, err := p.Volumes.Capacity(ctx)
	if errors.Is(err, errAbsent) || errors.Is(err, errOther) {
		return devices.Capacity{}, nil
	}
	if err != nil {
		return devices.Capacity{}, err
	}
	return devices.Capacity{Available: devices.RoomFor(c.Available, v.OvercommitPercent) / blockSize * blockSize, Largest: c.Largest, Smallest: blockSize}, nil
}
