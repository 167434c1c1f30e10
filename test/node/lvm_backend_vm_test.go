//go:build vm

package node

import (
	"os/exec"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/driver"
	"github.com/csi-node/csi-node/test/harness"
)

// An operator's word makes a logical volume blank, though nobody can read it while it is
// not active.
func TestClearMakesALogicalVolumeBlank(t *testing.T) {
	disk, _ := rack{t, t.TempDir()}.disk("pv", 68*mib)
	lvm := func(args ...string) {
		t.Helper()
		config := `activation{udev_sync=0 udev_rules=0 monitoring=0} devices{use_devicesfile=0 obtain_device_list_from_udev=0 global_filter=["a|^` + disk + `$|","r|.*|"]}`
		if out, err := exec.Command("lvm", append([]string{args[0], "--config", config}, args[1:]...)...).CombinedOutput(); err != nil {
			t.Errorf("lvm %q: %v: %s", args, err, out)
		}
	}
	lvm("vgcreate", "--yes", "cleared", disk)
	t.Cleanup(func() { lvm("vgremove", "--force", "--force", "--yes", "cleared") })
	p := harness.Start(t, harness.Options{Flags: []string{"--lvm-groups", "cleared"}})
	ctx := t.Context()
	v := harness.NewVolume(t, p, "v", blockAs(multiWriter))
	made, err := p.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: "v", Parameters: map[string]string{"backend": "lvm"}, CapacityRange: &csi.CapacityRange{RequiredBytes: 32 * mib},
		VolumeCapabilities: []*csi.VolumeCapability{v.Capability},
	})
	must(t, err)
	v.ID, v.Context = made.GetVolume().GetVolumeId(), made.GetVolume().GetVolumeContext()
	pod := v.Target("pod")
	must(t, v.Up(ctx, pod))
	write(t, pod, "raw")
	line := "csi-node volume clear-device " + v.ID
	refused(t, p, 1, line+" --i-understand-this-destroys-data", "in use")
	must(t, v.Down(ctx, pod))

	v.Capability = mountAs("ext4", multiWriter)
	mustRefuse(t, v.Stage(ctx), codes.FailedPrecondition, v.ID, "found data at byte 0", "clear-device")
	refused(t, p, 1, line, "nothing was changed")
	var c driver.Clearance
	typed(t, p, line+" --i-understand-this-destroys-data", &c)
	if !c.Cleared || c.Blank || !c.Raw || c.Backing != "cleared/v" || c.Bytes != 32*mib {
		t.Errorf("%+v", c)
	}
	must(t, v.Stage(ctx))
	must(t, v.Unstage(ctx))
	_, err = p.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
	must(t, err)
}
