//go:build vm

package node

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"sigs.k8s.io/yaml"

	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/test/harness"
)

// volumeGroup makes a volume group on a disk of its own, until the test ends. It returns the
// file behind the disk, and lvm, which sees no other disk.
func volumeGroup(t *testing.T, name string, bytes int64) (file string, lvm func(args ...string) string) {
	t.Helper()
	node, file := newDisk(t, bytes)
	return file, volumeGroupOf(t, name, node)
}

// volumeGroupOf makes a volume group of disks, until the test ends.
func volumeGroupOf(t *testing.T, name string, disks ...string) (lvm func(args ...string) string) {
	t.Helper()
	lvm = lvmOf(t, disks...)
	lvm(append([]string{"vgcreate", "--yes", name}, disks...)...)
	t.Cleanup(func() { lvm("vgremove", "--force", "--force", "--yes", name) })
	return lvm
}

// lvmOf returns lvm, which sees only some disks.
func lvmOf(t *testing.T, disks ...string) func(args ...string) string {
	config := lvmConfig(disks...)
	return func(args ...string) string {
		t.Helper()
		cmd := exec.Command("lvm", append([]string{args[0], "--config", config}, args[1:]...)...)
		cmd.Env = append(os.Environ(), "DM_DISABLE_UDEV=1") // as the guest has none
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("lvm %q: %v: %s", args, err, out)
		}
		return strings.TrimSpace(string(out))
	}
}

// lvmConfig is the configuration of an lvm that sees only some disks, in a guest without udev.
func lvmConfig(disks ...string) string {
	return `activation{udev_sync=0 udev_rules=0 monitoring=0} devices{use_devicesfile=0 obtain_device_list_from_udev=0 global_filter=["a/^(` + strings.ReplaceAll(strings.Join(disks, "|"), "/", `\/`) + `)$/","r/.*/"]}`
}

// logical makes a volume in a volume group, with the parameters of a class.
func logical(t *testing.T, p *harness.Plugin, group, name string, bytes int64, c *csi.VolumeCapability, more ...string) *volume {
	t.Helper()
	v := harness.NewVolume(t, p, name, c)
	parameters := map[string]string{"backend": "lvm", "volumeGroup": group}
	for _, parameter := range more {
		key, value, _ := strings.Cut(parameter, "=")
		parameters[key] = value
	}
	made, err := p.Controller.CreateVolume(t.Context(), v.CreateRequest(bytes, parameters))
	must(t, err)
	v.ID, v.Context = made.GetVolume().GetVolumeId(), made.GetVolume().GetVolumeContext()
	return v
}

// holds reports whether a text is in a file, which may be larger than the guest's memory.
func holds(t *testing.T, file, text string) bool {
	t.Helper()
	f, err := os.Open(file)
	must(t, err)
	defer f.Close()
	var last []byte // the end of what was read before, in which the text may begin
	for chunk := make([]byte, mib); ; {
		n, err := f.Read(chunk)
		if err == io.EOF {
			return false
		}
		must(t, err)
		window := append(last, chunk[:n]...)
		if bytes.Contains(window, []byte(text)) {
			return true
		}
		last = append([]byte(nil), window[max(len(window)-len(text), 0):]...)
	}
}

// The commands of docs/lvm.md make a group in which the classes of deploy/overlays/lvm have volumes.
func TestGroupOfTheDocs(t *testing.T) {
	node, _ := newDisk(t, 256*mib)
	lvm := lvmOf(t, node)
	t.Cleanup(func() { lvm("vgremove", "--force", "--force", "--yes", "docs") })
	t.Run("commands", func(t *testing.T) {
		dir := t.TempDir()
		write(t, filepath.Join(dir, "lvm.conf"), lvmConfig(node))
		t.Setenv("LVM_SYSTEM_DIR", dir)
		t.Setenv("DM_DISABLE_UDEV", "1")
		follow(t, "lvm.md", "## What the node needs", "/dev/nvme1n1", node, "vg0", "docs", "400g", "64m", "4g", "4m")
	})
	text, err := os.ReadFile("../../deploy/overlays/lvm/values.yaml")
	must(t, err)
	var values struct {
		ExtraStorageClasses []struct {
			Suffix     string
			Parameters map[string]string
		}
	}
	must(t, yaml.Unmarshal([]byte(strings.ReplaceAll(string(text), "vg0", "docs")), &values))
	if len(values.ExtraStorageClasses) != 2 {
		t.Errorf("the classes are %+v", values)
	}
	p := harness.Start(t, harness.Options{Flags: []string{"--lvm-groups", "docs"}})
	for _, class := range values.ExtraStorageClasses {
		var parameters []string
		for key, value := range class.Parameters {
			parameters = append(parameters, key+"="+value)
		}
		v := logical(t, p, "docs", "in-"+class.Suffix, 32*mib, mountAs("ext4", multiWriter), parameters...)
		must(t, v.Up(t.Context(), v.Target("pod")))
		write(t, filepath.Join(v.Target("pod"), "file"), "kept")
		must(t, v.Down(t.Context(), v.Target("pod")))
		must(t, v.Delete(t.Context()))
	}
}

// An encrypted logical volume's life: it grows beneath its pod, through all three of its
// parts, though the plugin dies at each of them; it is known again when the store is lost;
// and what the pod writes is nowhere on the disk.
func TestEncryptedLogicalVolume(t *testing.T) {
	file, lvm := volumeGroup(t, "encrypted", 480*mib)
	lvm("lvcreate", "--yes", "--type", "thin-pool", "--size", "208M", "--poolmetadatasize", "4M", "--name", "tank", "encrypted")
	o := harness.Options{Flags: []string{"--lvm-groups", "encrypted"}}
	p := harness.Start(t, o)
	ctx := t.Context()
	const text = "what nobody else may read"
	for name, parameters := range map[string][]string{
		"thick": {"provisioning=thick"}, "thin": {"provisioning=thin", "thinPool=tank"},
	} {
		v := logical(t, p, "encrypted", name, 32*mib, mountAs("ext4", multiWriter), append(parameters, luks.EncryptionKey+"="+luks.LUKS2)...)
		v.Secrets = map[string]string{luks.PassphraseKey: "of " + name}
		pod, pod2 := v.Target("pod"), v.Target("pod-2")
		must(t, v.Up(ctx, pod))
		write(t, filepath.Join(pod, "file"), text)

		bytes := int64(32 * mib)
		for _, step := range []string{"grow-device", "grow-layer", "grow-filesystem"} {
			bytes += 32 * mib
			p.Restart(harness.Options{Flags: o.Flags, Faults: true, Env: []string{"CSI_NODE_FAULT=after:" + step + "=die"}})
			if _, err := v.ExpandAt(ctx, pod, bytes); err == nil {
				t.Errorf("%s: it grew, and the plugin should have died", step)
			}
			<-p.Exited()
			p.Start(o)
			if got, err := v.ExpandAt(ctx, pod, bytes); err != nil || got != bytes {
				t.Errorf("%s: it has %d bytes, not %d (%v)", step, got, bytes, err)
			}
			if total := v.Total(pod); total < bytes*3/4 {
				t.Errorf("%s: the file system has %d of %d bytes", step, total, bytes)
			}
			mustRead(t, filepath.Join(pod, "file"), text)
		}

		p.Terminate()
		must(t, os.RemoveAll(p.StateDir))
		p.Start(o)
		must(t, v.Publish(ctx, pod2))
		mustRead(t, filepath.Join(pod2, "file"), text)
		must(t, v.Unpublish(ctx, pod))
		must(t, v.Down(ctx, pod2))
		v.Secrets = map[string]string{luks.PassphraseKey: "another"}
		mustRefuse(t, v.Stage(ctx), codes.Unauthenticated, luks.PassphraseKey)
		v.Secrets[luks.PassphraseKey] = "of " + name
		must(t, v.Up(ctx, pod))
		mustRead(t, filepath.Join(pod, "file"), text)
		must(t, v.Down(ctx, pod))
		if holds(t, file, text) {
			t.Error("the disk holds what the pod wrote")
		}
		must(t, v.Delete(ctx))
	}
}
