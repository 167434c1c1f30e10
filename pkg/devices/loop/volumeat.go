package loop

import (
	"bytes"
	"os"
	"path/filepath"

	"github.com/csi-node/csi-node/pkg/state"
)

// VolumeAt returns the id of the volume for which the device with a number
// stands, by what sysfs names as its backing; "" when it stands for none of the
// pool. It asks neither the device nor the pool's disk.
func (b *Backend) VolumeAt(number state.DeviceNumber) string {
	raw, err := os.ReadFile(filepath.Join("/sys/dev/block", number.String(), "loop", "backing_file"))
	if err != nil {
		return ""
	}
	backing := string(bytes.TrimSuffix(raw, []byte("\n")))
	id := filepath.Base(filepath.Dir(backing))
	if path, err := b.pool.DataPath(id); err != nil || path != backing {
		return ""
	}
	return id
}
