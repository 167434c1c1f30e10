//go:build vm

package lvm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/devices"
	existing "github.com/csi-node/csi-node/pkg/devices/disk"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestMain(m *testing.M) {
	drivertest.Main(m, driver.Options{Name: "csi-node.local", Program: "csi-node", Backends: []devices.Kind{Kind(), existing.Kind()}})
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
					VolumeCapabilities: []*csi.VolumeCapability{harness.Shared("ext4")}, // another might make it larger
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

// A group that a pod makes on its raw volume, a disk of the node, is none of the node's:
// not while the pod has it, and not later, until somebody removes the note.
func TestGroupOnARawVolume(t *testing.T) {
	machine.Kernel(t)
	node := newPV(t, 64*mib)
	program, err := os.Executable() // which TestMain makes the driver
	require.NoError(t, err)
	p := harness.New(t)
	p.Driver = drivertest.Driver(program, "--lvm-groups", "pods")
	p.Start(harness.Options{})
	raw := harness.NewVolume(t, p, "raw", harness.BlockAs(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER))
	raw.Context = map[string]string{devices.BackendKey: existing.Name, existing.PathKey: node}
	require.NoError(t, raw.Up(t.Context(), raw.Target("pod")))
	lvmOn(t, []string{node}, "vgcreate", "--yes", "pods", node)
	defer removeGroup(t, "pods", node)

	v := harness.NewVolume(t, p, "v", harness.Shared("ext4"))
	request := v.CreateRequest(8*mib, map[string]string{devices.BackendKey: Name})
	refused := func(words string) {
		t.Helper()
		_, err := p.Controller.CreateVolume(t.Context(), request)
		if status.Code(err) == codes.OK || !strings.Contains(status.Convert(err).Message(), words) {
			t.Errorf("%v, not %q", err, words)
		}
	}
	refused("it is the volume raw")
	require.NoError(t, raw.Down(t.Context(), raw.Target("pod")))
	refused("it was the raw block volume raw")
	notes, err := filepath.Glob(filepath.Join(p.Dir, "lib", "notes", "*.json"))
	require.NoError(t, err)
	for _, note := range notes {
		require.NoError(t, os.Remove(note))
	}
	made, err := p.Controller.CreateVolume(t.Context(), request)
	require.NoError(t, err)
	_, err = p.Controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: made.GetVolume().GetVolumeId()})
	require.NoError(t, err)
}
