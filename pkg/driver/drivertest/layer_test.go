package drivertest_test

import (
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

func TestMain(m *testing.M) { drivertest.Main(m, options()) }

// options are those of a driver with a pool and a layer. The directories in its
// flags tell it from one that runs beside it.
func options() driver.Options {
	sum := crc32.ChecksumIEEE([]byte(strings.Join(os.Args, " ")))
	return driver.Options{
		Name:     "csi.layers.example",
		Backends: []devices.Kind{pool.Kind()},
		Layers:   []devices.Layer{devicestest.Offset{Owner: strconv.FormatUint(uint64(sum), 36)}},
	}
}

// A driver whose volumes are stacks of two devices passes the suite.
func TestLayeredDriver(t *testing.T) {
	t.Parallel()
	drivertest.Run(t, func(_ *testing.T, dir string) drivertest.Harness {
		return drivertest.Harness{
			Flags:      []string{"--pool-dir", filepath.Join(dir, "pool"), "--pool-reserve", "0"},
			Filesystem: "ext4", // the layer leaves less of the volume than the pool counts with
			Create: func(t *testing.T, p *harness.Plugin, name string) drivertest.Volume {
				resp, err := p.Controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
					Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: drivertest.Size},
					Parameters: map[string]string{"provisioning": "thin"},
					VolumeCapabilities: []*csi.VolumeCapability{{
						AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
						AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
					}},
				})
				require.NoError(t, err)
				id, context := resp.GetVolume().GetVolumeId(), devicestest.OffsetVolume()
				maps.Copy(context, resp.GetVolume().GetVolumeContext())
				return drivertest.Volume{ID: id, Context: context, Grows: true, Delete: func() {
					if _, err := p.Controller.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: id}); err != nil {
						t.Error(err)
					}
				}}
			},
		}
	})
}
