package main

import (
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

func TestMain(m *testing.M) { drivertest.Main(m, options()) }

// The program passes the suite that a vendor's driver runs.
func TestDriver(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, func(_ *testing.T, dir string) drivertest.Harness {
		return drivertest.Harness{
			Flags: []string{"--pool-dir", filepath.Join(dir, "pool"), "--pool-reserve", "0"},
			Create: func(t *testing.T, p *harness.Plugin, name string) drivertest.Volume {
				resp, err := p.Controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
					Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: drivertest.Size},
					VolumeCapabilities: []*csi.VolumeCapability{harness.Shared("ext4")}, // another might make it larger
				})
				require.NoError(t, err)
				v := resp.GetVolume()
				return drivertest.Volume{ID: v.GetVolumeId(), Context: v.GetVolumeContext(), Grows: true, Delete: func() {
					if _, err := p.Controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()}); err != nil {
						t.Error(err)
					}
				}}
			},
		}
	})
}
