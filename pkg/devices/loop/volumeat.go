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
	path, err := b.pool.DataPath(id)
	switch {
	case err != nil:
		return ""
	case path == backing:
		return id
	}
	// An earlier container attached it, and the path is what is left of that one's.
	name, err := os.Readlink(filepath.Join("/sys/dev/block", number.String()))
	if err != nil || filepath.Base(backing) != filepath.Base(path) || b.hint(b.tag(id)) != filepath.Base(name) {
		return ""
	}
	return id
}
