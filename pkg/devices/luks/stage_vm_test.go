//go:build vm

package luks

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/driver/drivertest"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// The stage of a formatted encrypted volume, beside what anybody has to do for it: attach
// its file, open the device with the passphrase, and mount it. docs/encryption.md tells the
// result.
//
//	CSI_NODE_VM_FLAGS="-test.run - -test.bench Stage" go test -tags vm -v -run 'TestOtherKernel/packages$' ./test/vm
func BenchmarkStage(b *testing.B) {
	machine.Kernel(b)
	p := harness.New(b)
	self, err := os.Executable()
	require.NoError(b, err)
	p.Driver = drivertest.Driver(self, flags(p.Dir)...)
	p.Start(harness.Options{})
	v := harness.NewVolume(b, p, "v", harness.Shared("ext4"))
	made, err := v.Controller.CreateVolume(b.Context(), v.CreateRequest(64*mib, class))
	require.NoError(b, err)
	v.Context, v.Secrets = made.GetVolume().GetVolumeContext(), secrets("one", "")
	require.NoError(b, v.Stage(b.Context())) // formats it
	require.NoError(b, v.Unstage(b.Context()))

	b.Run("bare", func(b *testing.B) {
		const name = "csi-node-bench"
		dir := b.TempDir()
		for b.Loop() {
			node := machine.Losetup(b, v.Data())
			open := exec.Command("cryptsetup", "open", "--key-file", "-", node, name)
			open.Env = append(os.Environ(), "DM_DISABLE_UDEV=1")
			open.Stdin = strings.NewReader("one")
			if out, err := open.CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
			require.NoError(b, unix.Mount("/dev/mapper/"+name, dir, "ext4", 0, ""))
			b.StopTimer()
			require.NoError(b, unix.Unmount(dir, 0))
			end := exec.Command("cryptsetup", "close", name)
			end.Env = open.Env
			if out, err := end.CombinedOutput(); err != nil {
				b.Fatalf("%v: %s", err, out)
			}
			machine.LosetupDetach(b, node)
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
	require.NoError(b, v.Delete(b.Context()))
}
