package pool

import (
	"context"

	"github.com/csi-node/csi-node/pkg/devices"
)

// Measure implements devices.Meter.
func (b *Backend) Measure(ctx context.Context) ([]devices.Measurement, error) {
	c, err := b.pool.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	return measurements(c), nil
}

func measurements(c Capacity) []devices.Measurement {
	bytes := func(name, help string, value int64) devices.Measurement {
		return devices.Measurement{Name: name + "_bytes", Help: help, Value: float64(value)}
	}
	volumes := func(provisioning string, value int) devices.Measurement {
		return devices.Measurement{Name: "volumes", Help: "Volumes of the pool; the provisioning of one with damaged metadata is unknown.",
			Labels: map[string]string{"provisioning": provisioning}, Value: float64(value)}
	}
	return []devices.Measurement{
		bytes("size", "Size of the pool's file system.", c.Total),
		bytes("free", "What nobody has taken of the pool's file system.", c.Free),
		bytes("available", "What new volumes and growth can be promised.", c.Available),
		bytes("allocated", "What volumes have taken.", c.Allocated),
		bytes("promised", "What volumes were promised and have not taken; more than is free if promises are broken.", c.Promised),
		bytes("owed", "What volumes may yet take; more than is free if the pool is overcommitted.", c.Owed),
		volumes(string(Thick), c.Thick), volumes(string(Thin), c.Thin), volumes("unknown", c.Damaged),
	}
}
