//go:build vm

package lvm

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// The stage of a formatted volume, beside what anybody has to do for it: activate the
// logical volume and mount it. docs/lvm.md tells the result.
//
//	CSI_NODE_VM_FLAGS="-test.run - -test.bench Stage" go test -tags vm -v -run 'TestOtherKernel/lvm$' ./test/vm
func BenchmarkStage(b *testing.B) {
	machine.Kernel(b)
	disk := newGroup(b, "stage", 260*mib)
	newPool(b, "stage", disk, 128*mib)
	program, err := os.Executable() // which TestMain makes the driver
	require.NoError(b, err)
	p := harness.New(b)
	p.Driver = drivertest.Driver(program, "--lvm-groups", "stage")
	p.Start(harness.Options{})
	for name, parameters := range map[string]map[string]string{
		"of-thick": {devices.BackendKey: Name},
		"of-thin":  {devices.BackendKey: Name, poolKey: "thin"},
	} {
		v := harness.NewVolume(b, p, name, harness.Shared("ext4"))
		made, err := p.Controller.CreateVolume(b.Context(), v.CreateRequest(64*mib, parameters))
		require.NoError(b, err)
		v.ID, v.Context = made.GetVolume().GetVolumeId(), made.GetVolume().GetVolumeContext()
		b.Run(name, func(b *testing.B) {
			path := "stage/" + name
			drivertest.BenchmarkStage(b, v,
				func(b *testing.B, dir string) {
					lvmOn(b, []string{disk}, "lvchange", "--activate", "y", path)
					require.NoError(b, unix.Mount(filepath.Join("/dev/mapper", deviceName("stage", name)), dir, "ext4", 0, ""))
				},
				func(b *testing.B, dir string) {
					require.NoError(b, machine.Unmount(dir))
					lvmOn(b, []string{disk}, "lvchange", "--activate", "n", path)
				})
		})
		require.NoError(b, v.Delete(b.Context()))
	}
}
