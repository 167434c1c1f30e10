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
	const name = "csi-node-bench"
	cryptsetup := func(b *testing.B, input string, args ...string) {
		cmd := exec.Command("cryptsetup", args...)
		cmd.Env, cmd.Stdin = append(os.Environ(), "DM_DISABLE_UDEV=1"), strings.NewReader(input)
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("cryptsetup %v: %v: %s", args, err, out)
		}
	}
	var node string
	drivertest.BenchmarkStage(b, v,
		func(b *testing.B, dir string) {
			node = machine.Losetup(b, v.Data())
			cryptsetup(b, "one", "open", "--key-file", "-", node, name)
			require.NoError(b, unix.Mount("/dev/mapper/"+name, dir, "ext4", 0, ""))
		},
		func(b *testing.B, dir string) {
			require.NoError(b, machine.Unmount(dir))
			cryptsetup(b, "", "close", name)
			machine.LosetupDetach(b, node)
		})
	require.NoError(b, v.Delete(b.Context()))
}
