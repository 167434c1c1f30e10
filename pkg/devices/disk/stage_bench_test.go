package disk

import (
	"os"
	"testing"

	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/require"
)

// The stage of a formatted disk, beside what anybody has to do for it: mount it.
// docs/disk.md tells the result.
func BenchmarkStage(b *testing.B) {
	program, err := os.Executable() // which TestMain makes the driver
	require.NoError(b, err)
	p := harness.New(b)
	p.Driver = drivertest.Driver(program)
	p.Start(harness.Options{})
	node, _ := newDisk(b, drivertest.Size)
	v := harness.NewVolume(b, p, "v", harness.Shared("ext4"))
	v.Context = map[string]string{PathKey: node}
	drivertest.BenchmarkStage(b, v,
		func(b *testing.B, dir string) { run(b, "mount", "-t", "ext4", node, dir) },
		func(b *testing.B, dir string) { run(b, "umount", dir) })
}
