package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	corev1 "k8s.io/api/core/v1"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// follow runs the first block of commands that follows some words in a page of docs, as root on the node, with the words in
// it replaced that stand for names or are others here.
func follow(t *testing.T, page, words string, replaced ...string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../../docs", page))
	must(t, err)
	_, after, is := strings.Cut(string(text), "\n"+words)
	var commands []string
	for line := range strings.Lines(after) {
		if strings.HasPrefix(line, "    ") {
			commands = append(commands, strings.NewReplacer(replaced...).Replace(strings.TrimSpace(line)))
		} else if len(commands) > 0 {
			break
		}
	}
	if !is || len(commands) == 0 {
		t.Fatalf("docs/%s has no commands after %q", page, words)
	}
	harness.Command(t, "sh", "-euxc", strings.Join(commands, "\n"))
}

// inPool replaces the directory of the pool.
func inPool(p *harness.Plugin, more ...string) []string {
	return append([]string{"/var/lib/csi-node/pool", p.PoolDir}, more...)
}

// room returns what the plugin says is left for thick volumes.
func room(t *testing.T, p *harness.Plugin) int64 {
	t.Helper()
	resp, err := p.Controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{})
	must(t, err)
	return resp.GetAvailableCapacity()
}

// used makes thick volumes, one with a file system and one without, writes to them, and takes them down. hold takes them up
// and down again, and says whether they hold what was written, in blocks of their own.
func used(t *testing.T, p *harness.Plugin) (volumes []*volume, hold func()) {
	t.Helper()
	for name, c := range map[string]*csi.VolumeCapability{"pvc-ext4": mountAs("ext4", singleWriter), "pvc-raw": blockAs(singleWriter)} {
		volumes = append(volumes, createAs(t, p, name, 32*mib, c, "thick"))
	}
	path := func(v *volume) string {
		if v.Capability.GetBlock() != nil {
			return v.Target("pod")
		}
		return filepath.Join(v.Target("pod"), "file")
	}
	for _, v := range volumes {
		must(t, v.Up(t.Context(), v.Target("pod")))
		harness.Command(t, "sh", "-c", "printf kept > '"+path(v)+"' && sync '"+path(v)+"'")
		must(t, v.Down(t.Context(), v.Target("pod")))
	}
	return volumes, func() {
		t.Helper()
		for _, v := range volumes {
			must(t, v.Up(t.Context(), v.Target("pod")))
			if have := harness.Command(t, "head", "-c4", path(v)); have != "kept" {
				t.Errorf("%s holds %q", v.ID, have)
			}
			if have := machine.Allocated(t, v.Data()); have < 32*mib {
				t.Errorf("of %s %d bytes are allocated", v.ID, have)
			}
			must(t, v.Down(t.Context(), v.Target("pod")))
		}
	}
}

// TestBackedUp: the copy of a volume that is not staged is put back into the pool by the commands of docs/operate.md, and has
// a PersistentVolume then.
func TestBackedUp(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	mountPool(t, p, 512*mib, "mkfs.xfs", "-q")
	p.Start(harness.Options{})
	volumes, hold := used(t, p)
	backup := filepath.Join(p.PoolDir, "backup") // on the same file system, which can share blocks
	makeDir(t, backup)
	for _, v := range volumes {
		replaced := inPool(p, "/backup", backup, "VOLUME", v.ID)
		follow(t, "operate.md", "- **The file in the pool**", replaced...)
		must(t, v.Delete(t.Context()))
		mustBeGone(t, v.Data())
		follow(t, "operate.md", "To put that copy back", replaced...)
		if blocks := harness.Command(t, "filefrag", "-v", v.Data()); strings.Contains(blocks, "shared") {
			t.Errorf("%s shares blocks with its copy, for which a full pool has no other: %s", v.ID, blocks)
		}
		var list corev1.PersistentVolumeList
		typed(t, p, "csi-node volume manifest "+v.ID, &list)
		if len(list.Items) != 1 || list.Items[0].Spec.CSI.VolumeHandle != v.ID {
			t.Errorf("the PersistentVolumes are %v", list.Items)
		}
	}
	hold()
}

// TestLargerDisk: the file system of the pool grows beneath the plugin, and the pool moves to another disk, by the commands
// of docs/operate.md.
func TestLargerDisk(t *testing.T) {
	t.Parallel()
	for _, mkfs := range [][]string{{"mkfs.ext4", "-q"}, {"mkfs.xfs", "-q"}} {
		t.Run(mkfs[0], func(t *testing.T) {
			t.Parallel()
			p := harness.New(t)
			mountPool(t, p, 512*mib, mkfs...)
			p.Start(harness.Options{})
			_, hold := used(t, p)
			before := room(t, p)

			if mkfs[0] == "mkfs.xfs" || mayResize(t) {
				device := harness.Command(t, "findmnt", "--noheadings", "--output=SOURCE", p.PoolDir)
				must(t, os.Truncate(harness.Command(t, "losetup", "--noheadings", "--output=BACK-FILE", device), 1024*mib))
				harness.Command(t, "losetup", "--set-capacity", device)
				other := map[string]string{"mkfs.ext4": "xfs_growfs", "mkfs.xfs": "resize2fs"}[mkfs[0]]
				follow(t, "operate.md", "**If the disk itself can grow**", inPool(p, "DEVICE", device, other, "true")...)
				if have := room(t, p); have < before+400*mib {
					t.Errorf("there was room for %d bytes, and is for %d", before, have)
				}
				hold()
			}

			p.Terminate()
			disk := filepath.Join(t.TempDir(), "disk")
			write(t, disk, "")
			must(t, os.Truncate(disk, 2048*mib))
			replaced := inPool(p, "NEW", disk, "/mnt/new", t.TempDir())
			follow(t, "operate.md", "2. On the node, as root, copy the pool", replaced...)
			follow(t, "operate.md", "3. Mount it in the place of the old one", replaced...)
			p.Start(harness.Options{})
			if have := room(t, p); have < before+1300*mib {
				t.Errorf("there was room for %d bytes, and is for %d", before, have)
			}
			hold()
		})
	}
}

// TestNewOperatingSystem: of what the plugin keeps on a node the pool alone is needed to find its volumes again.
func TestNewOperatingSystem(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	mountPool(t, p, 512*mib, "mkfs.xfs", "-q")
	o := harness.Options{Flags: []string{"--pool-require-mount"}}
	p.Start(o)
	_, hold := used(t, p)
	p.Terminate()
	for _, path := range []string{p.StateDir, filepath.Join(p.Dir, "lib"), p.PoolDir + ".uuid"} {
		must(t, os.RemoveAll(path))
	}
	p.Start(o)
	hold()
	if note, err := os.ReadFile(p.PoolDir + ".uuid"); err != nil || len(note) == 0 {
		t.Errorf("the note next to the pool is %q, %v", note, err)
	}
}
