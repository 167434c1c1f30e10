package pool

import (
	"path/filepath"

	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// VolumeAt returns the id of the volume that the device with a number shows, by the
// backing file in sysfs; "" when that is no volume of the pool. It asks neither the
// device nor the pool's disk.
func (b *Backend) VolumeAt(number state.DeviceNumber) string {
	name, backing := loop.BackingAt(number)
	if backing == "" {
		return ""
	}
	id := filepath.Base(filepath.Dir(backing))
	path, err := b.pool.DataPath(id)
	switch {
	case err != nil:
		return ""
	case path == backing:
		return id
	}
	// An earlier container attached it, so sysfs shows only a part of that one's path.
	if filepath.Base(backing) != dataFile || b.loops.Seen(b.tag(id)) != name {
		return ""
	}
	return id
}
