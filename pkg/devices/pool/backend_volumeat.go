package pool

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// VolumeAt returns the id of the volume for which the device with a number
// stands, by what sysfs names as its backing; "" when it stands for none of the
// pool. It asks neither the device nor the pool's disk.
func (b *Backend) VolumeAt(number state.DeviceNumber) string {
	sys := filepath.Join("/sys/dev/block", number.String())
	raw, err := os.ReadFile(filepath.Join(sys, "loop", "backing_file"))
	if err != nil {
		return ""
	}
	backing := strings.TrimSuffix(string(raw), "\n")
	id := filepath.Base(filepath.Dir(backing))
	path, err := b.pool.DataPath(id)
	switch {
	case err != nil:
		return ""
	case path == backing:
		return id
	}
	// An earlier container attached it, and the path is what is left of that one's.
	name, err := os.Readlink(sys)
	if err != nil || filepath.Base(backing) != dataFile || b.loops.Seen(b.tag(id)) != filepath.Base(name) {
		return ""
	}
	return id
}
