package pool

import (
	"context"
	"os"

	"github.com/csi-node/csi-node/pkg/loop"
)

// Pool returns the pool.
func (b *Backend) Pool() *Pool { return b.pool }

// AttachTakingDiscards attaches a volume's data as a crash leaves it that came
// before the device was told to refuse discards.
func (b *Backend) AttachTakingDiscards(ctx context.Context, loops *loop.Devices, path, id string) error {
	data, err := loop.StatFile(path)
	if err != nil {
		return err
	}
	return loops.Attach(ctx, loop.Request{
		Target: b.target(id, data),
		Shape:  loop.Shape{Sector: defaultSector},
		Open:   func() (*os.File, error) { return os.OpenFile(path, os.O_RDWR, 0) },
	})
}
