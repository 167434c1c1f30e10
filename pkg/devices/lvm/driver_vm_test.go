//go:build vm

package lvm

import (
	"fmt"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

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

// The whole driver, over a group with a thin pool: volumes live, and the plugin is killed
// at each step.
func TestDriver(t *testing.T) {
	machine.Kernel(t)
	disk := newGroup(t, "driver", 4<<30)
	newPool(t, "driver", disk, 1<<30)
	classes := []map[string]string{{devices.BackendKey: Name}, {devices.BackendKey: Name, poolKey: "thin"}}
	var mu sync.Mutex
	plugins, made := 0, 0
	drivertest.Run(t, func(*testing.T, string) drivertest.Harness {
		mu.Lock()
		plugins++
		// Of two plugins of one name each takes the other's devices for orphans.
		name := fmt.Sprintf("plugin-%d.example", plugins)
		mu.Unlock()
		return drivertest.Harness{
			Flags: []string{"--lvm-groups", "driver", "--driver-name", name},
			Create: func(t *testing.T, p *harness.Plugin, name string) drivertest.Volume {
				mu.Lock()
				made++
				class := classes[made%len(classes)]
				mu.Unlock()
				answer, err := p.Controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
					Name: t.Name() + name, Parameters: class, CapacityRange: &csi.CapacityRange{RequiredBytes: drivertest.Size},
					VolumeCapabilities: []*csi.VolumeCapability{harness.Shared("")},
				})
				require.NoError(t, err)
				v := answer.GetVolume()
				return drivertest.Volume{ID: v.GetVolumeId(), Context: v.GetVolumeContext(), Grows: true, Delete: func() {
					_, err := p.Controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
					require.NoError(t, err)
				}}
			},
		}
	})
}
