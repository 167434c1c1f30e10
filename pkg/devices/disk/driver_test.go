package disk

import (
	"sync/atomic"
	"testing"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestMain(m *testing.M) {
	drivertest.Main(m, driver.Options{Name: "csi-node.local", Program: "csi-node", Backends: []devices.Kind{Kind()}})
}

// The whole driver, over disks that are named by a path, by what they are, or by the publish
// context of a Controller elsewhere alone.
func TestDriverOverDisks(t *testing.T) {
	machine.Kernel(t)
	var made atomic.Int64
	drivertest.Run(t, func(*testing.T, string) drivertest.Harness {
		return drivertest.Harness{
			Filesystem: "ext4",
			Create: func(t *testing.T, _ *harness.Plugin, name string) drivertest.Volume {
				node, _ := newDisk(t, drivertest.Size)
				info, err := blockdev.Look(node)
				require.NoError(t, err)
				v := drivertest.Volume{ID: name}
				switch made.Add(1) % 3 {
				case 0:
					v.Context = map[string]string{PathKey: node}
				case 1:
					v.Context = map[string]string{string(blockdev.Backing): info.Identities[blockdev.Backing]}
				case 2:
					v.Publish = map[string]string{PathKey: node}
				}
				return v
			},
		}
	})
}
