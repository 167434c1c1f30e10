//go:build vm

package node

import (
	"fmt"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

var loopNumber = regexp.MustCompile(`/dev/loop[0-9]+`)

// A node whose kernel lacks a module says which, in the words of docs/troubleshoot.md, and stages the volume once the
// module can be loaded.
func TestMissingModule(t *testing.T) {
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	for modules, tt := range map[string]struct {
		fsType     string
		parameters map[string]string
		told       string
	}{
		"btrfs":                  {"btrfs", nil, `rpc error: code = FailedPrecondition desc = volume volume: step mount for stage: mount btrfs of /dev/loop7 at /var/lib/kubelet/plugins/kubernetes.io/csi/csi-node.local/volume/globalmount: this node's kernel has no file system "btrfs": load its module`},
		"dm_crypt":               {"ext4", map[string]string{luks.EncryptionKey: luks.LUKS2}, `rpc error: code = FailedPrecondition desc = volume volume: step open-layer luks2 for stage: open: this node's kernel cannot encrypt devices: load its module dm_crypt`},
		"dm_crypt beside dm_mod": {"ext4", map[string]string{luks.EncryptionKey: luks.LUKS2}, `rpc error: code = FailedPrecondition desc = volume volume: step open-layer luks2 for stage: open: this node's kernel cannot encrypt devices: load its module dm_crypt`},
	} {
		t.Run(modules, func(t *testing.T) {
			module, other, beside := strings.Cut(modules, " beside ")
			if out, err := exec.Command("modprobe", "--remove", module).CombinedOutput(); err != nil { // and what it alone needs
				t.Fatalf("%v: %s", err, out)
			}
			if beside {
				must(t, exec.Command("modprobe", other).Run())
			}
			must(t, unix.Mount("none", "/lib/modules", "tmpfs", 0, ""))
			t.Cleanup(func() { _ = machine.Unmount("/lib/modules") }) // it is, unless the test failed
			v := harness.NewVolume(t, p, "volume", mountAs(tt.fsType, multiWriter))
			v.Secrets = map[string]string{luks.PassphraseKey: "a passphrase"}
			made, err := p.Controller.CreateVolume(ctx, v.CreateRequest(smallest("btrfs"), tt.parameters))
			must(t, err)
			v.Context = made.GetVolume().GetVolumeContext()
			err = v.Stage(ctx)
			told := loopNumber.ReplaceAllString(strings.ReplaceAll(fmt.Sprint(err), p.KubeletDir, "/var/lib/kubelet"), "/dev/loop7")
			if told != tt.told {
				t.Errorf("it says %s, and not %s", told, tt.told)
			}
			must(t, machine.Unmount("/lib/modules"))
			must(t, exec.Command("modprobe", module).Run())
			must(t, v.Stage(ctx))
			v.End()
		})
	}
}
