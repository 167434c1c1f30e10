//go:build vm

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
)

// scsiDisk gives the node a SCSI disk until the test ends. plug looks for it, and names it.
func scsiDisk(t *testing.T) (plug func() (name string)) {
	t.Helper()
	for _, module := range [][]string{{"sd_mod"}, {"scsi_debug", "dev_size_mb=272"}} {
		if out, err := exec.Command("modprobe", module...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("modprobe", "--remove", "scsi_debug").CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, out)
		}
	})
	host, err := filepath.Glob("/sys/bus/pseudo/drivers/scsi_debug/adapter0/host*")
	must(t, err)
	if len(host) != 1 {
		t.Fatalf("hosts: %q", host)
	}
	rescan := filepath.Join("/sys/class/scsi_host", filepath.Base(host[0]), "scan")
	return func() (name string) {
		t.Helper()
		must(t, os.WriteFile(rescan, []byte("- - -"), 0))
		harness.Eventually(t, "the disk is there", func() bool {
			found, err := filepath.Glob(host[0] + "/target*/*/block/*")
			must(t, err)
			if len(found) == 1 {
				name = filepath.Base(found[0])
			}
			return name != ""
		})
		return name
	}
}

// A SCSI disk takes commands that write even in its read-only mode. A pod that has it raw for
// reading sees a device that takes none.
func TestReadOnlyDiskTakesNoCommands(t *testing.T) {
	name := scsiDisk(t)()
	p, o := disks(t, harness.Options{})
	p.Start(o)
	v := harness.NewVolume(t, p, "a-disk", harness.BlockAs(csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY))
	v.Context = map[string]string{"backend": "disk", "path": "/dev/" + name}
	pod := v.Target("pod")
	must(t, v.Up(t.Context(), pod))
	takesCommands := func(path string) bool {
		t.Helper()
		f, err := os.Open(path)
		must(t, err)
		defer f.Close()
		const version = 0x2282 // SG_GET_VERSION_NUM of scsi/sg.h
		_, err = unix.IoctlGetInt(int(f.Fd()), version)
		return err == nil
	}
	if !takesCommands("/dev/" + name) {
		t.Error("the disk itself takes no commands, so nothing is shown")
	}
	if takesCommands(pod) {
		t.Error("the pod's device takes commands")
	}
	must(t, v.Down(t.Context(), pod))
	mustBeFree(t, "/dev/"+name)
}

// A disk that is pulled while its volume is in use, and whose node goes with it: the volume
// is taken down, and set up again when the disk is back.
func TestPulledDisk(t *testing.T) {
	plug := scsiDisk(t)
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p, o := disks(t, harness.Options{})
			p.Start(o)
			ctx, name := t.Context(), plug()
			wwid, err := os.ReadFile(fmt.Sprintf("/sys/block/%s/device/wwid", name))
			must(t, err)
			must(t, exec.Command("wipefs", "-aq", "/dev/"+name).Run())
			must(t, exec.Command("blkdiscard", "-f", "-z", "/dev/"+name).Run())
			v := harness.NewVolume(t, p, "a-disk-"+fsType, harness.Shared(fsType))
			v.Context = map[string]string{"backend": "disk", "wwid": strings.TrimSpace(string(wwid))}
			pod := v.Target("pod")
			must(t, v.Up(ctx, pod))
			write(t, filepath.Join(pod, "file"), "kept")
			must(t, exec.Command("sync", "--file-system", pod).Run())
			must(t, os.WriteFile(fmt.Sprintf("/sys/block/%s/device/delete", name), []byte("1"), 0))
			harness.Eventually(t, "the node of the disk is gone", func() bool {
				_, err := os.Lstat("/dev/" + name)
				return os.IsNotExist(err)
			})
			must(t, v.Unpublish(ctx, pod))
			mustBeGone(t, pod)
			must(t, v.Unstage(ctx))
			mustBeBare(t, p, v.Staging)
			mustHaveNoRecord(t, p)

			name = plug()
			must(t, v.Up(ctx, pod))
			mustRead(t, filepath.Join(pod, "file"), "kept")
			must(t, v.Down(ctx, pod))
			mustBeFree(t, "/dev/"+name)
		})
	}
}

// mustBeBare fails unless nothing is mounted at a path.
func mustBeBare(t testing.TB, p *harness.Plugin, path string) {
	t.Helper()
	if n := mountsAt(p, path); n > 0 {
		t.Errorf("%d mounts at %s", n, path)
	}
}
