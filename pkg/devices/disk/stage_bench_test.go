package disk

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

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
	require.NoError(b, v.Stage(b.Context())) // formats it
	require.NoError(b, v.Unstage(b.Context()))

	b.Run("bare", func(b *testing.B) {
		dir := b.TempDir()
		for b.Loop() {
			require.NoError(b, unix.Mount(node, dir, "ext4", 0, ""))
			b.StopTimer()
			require.NoError(b, unix.Unmount(dir, 0))
			b.StartTimer()
		}
	})
	b.Run("command", func(b *testing.B) {
		dir := b.TempDir()
		for b.Loop() {
			run(b, "mount", "-t", "ext4", node, dir)
			b.StopTimer()
			require.NoError(b, unix.Unmount(dir, 0))
			b.StartTimer()
		}
	})
	b.Run("staged", func(b *testing.B) {
		for b.Loop() {
			require.NoError(b, v.Stage(b.Context()))
			b.StopTimer()
			require.NoError(b, v.Unstage(b.Context()))
			b.StartTimer()
		}
	})
}
