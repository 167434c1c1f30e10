package filesystem

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/machine"
)

// A kind that the plugin does not make is told, and never said to grow.
func TestProbeExt3(t *testing.T) {
	h := newHost(t)
	image := newImage(t, 16*mib)
	command(t, "mkfs.ext3", "-q", image)
	if c := probe(t, h, attach(t, image), ""); c.FSType != "ext3" || c.GrowsMounted || c.GrowsUnmounted {
		t.Errorf("%+v", c)
	}
}

// What the kernel writes into the superblock of a mounted ext4 is seen at
// once through the device, even by somebody who has read it before.
func TestMountedExt4IsCoherent(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), device, "ext4", nil))
	d, err := open(device, 0) // keeps the pages of the device in memory
	must0(t, err)
	defer d.Close()
	recovers := func() bool {
		head, err := d.readAt(0, headSize)
		must0(t, err)
		s, err := parseExt4(head)
		must0(t, err)
		return s.incompat&incompatRecover != 0
	}
	if recovers() {
		t.Error("a fresh ext4 has a journal to replay")
	}
	dir := mount(t, device, "ext4")
	if !recovers() {
		t.Error("the mount did not show in the superblock")
	}
	unmount(t, dir)
	if recovers() {
		t.Error("the unmount did not show in the superblock")
	}
}

// The superblock changes under Probe's eyes while a mounted ext4 works.
func TestProbeBusyExt4(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), device, "ext4", nil))
	dir := mount(t, device, "ext4")
	probesBusy(t, h, device, dir, 5000, func(int) error {
		f, err := os.Create(filepath.Join(dir, "file"))
		if err != nil {
			return err
		}
		return errors.Join(unix.Unlink(f.Name()), f.Close()) // an orphan inode goes through the superblock
	})
}

func TestProbeWrongMountpoint(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 300*mib))
	must0(t, h.Format(t.Context(), device, "xfs", nil))
	_, err := h.Probe(t.Context(), device, t.TempDir())
	wantClass(t, err, state.Unavailable, "what is mounted at")
}

func TestCheck(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), device, "ext4", nil))
	for _, flags := range []string{"0", "3"} { // not cleanly unmounted; errors seen
		command(t, "debugfs", "-w", "-R", "set_super_value state "+flags, device.Path)
		if c := probe(t, h, device, ""); c.Kind != state.ContentsFilesystem || !c.NeedsCheck {
			t.Errorf("state %s: %+v", flags, c)
		}
		must0(t, h.Check(t.Context(), device, "ext4"))
		if c := probe(t, h, device, ""); c.NeedsCheck {
			t.Errorf("state %s after Check: %+v", flags, c)
		}
	}
	command(t, "debugfs", "-w", "-R", "clri <2>", device.Path)
	command(t, "debugfs", "-w", "-R", "set_super_value state 2", device.Path)
	wantClass(t, h.Check(t.Context(), device, "ext4"), state.FailedPrecondition, "run e2fsck -f by hand on its data", "oot inode")
}

// A device is not checked by a name that another device gets meanwhile.
func TestCheckKeepsTheDevice(t *testing.T) {
	h, image, other := newHost(t), newImage(t, 16*mib), newImage(t, 16*mib)
	device := attach(t, image)
	for _, file := range []string{image, other} {
		command(t, "mkfs.ext4", "-q", file)
		command(t, "debugfs", "-w", "-R", "set_super_value state 0", file)
	}
	before := digest.Of(t, other)
	real, err := exec.LookPath("e2fsck")
	must0(t, err)
	machine.Script(t, "e2fsck", fmt.Sprintf("losetup -d %[1]s\nlosetup %[1]s %[2]s\nexec %[3]s \"$@\"", device.Path, other, real))
	defer machine.Detach(device.Path, other)
	must0(t, h.Check(t.Context(), device, "ext4"))
	if digest.Of(t, other) != before {
		t.Error("another file system was checked")
	}
	if said := command(t, "dumpe2fs", "-h", image); !strings.Contains(said, "Filesystem state:         clean") {
		t.Errorf("it was not checked:\n%s", said)
	}
}

// How files are called is in no log and no error; which inodes they are is.
func TestCheckLeavesOutNames(t *testing.T) {
	const device = "/dev/loop7"
	for said, want := range map[string]string{
		device + ": Entry 'pay 2024; it's.xlsx' in /to the/boss (12) has deleted/unused inode 13.  CLEARED.": device + ": Entry '…' in … (12) has deleted/unused inode 13.  CLEARED.",
		"24.xlsx' in / (2) has deleted/unused inode 13.; " + device + ": clean":                              "…' in … (2) has deleted/unused inode 13.; " + device + ": clean",
		device + ": Symlink /a/secret (inode #12) is invalid.":                                               device + ": Symlink … (inode #12) is invalid.",
		device + ": Duplicate entry 'secret' found.":                                                         device + ": Duplicate entry '…' found.",
		device + ": Unconnected directory inode 12 (was in /secret/dir)":                                     device + ": Unconnected directory inode 12 (was in …)",
		device + ": File /a (secret) b (inode #15, mod time) has 1 shared block":                             device + ": File … (inode #15, mod time) has 1 shared block",
		device + ": UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY.; (i.e., without -a or -p options)":          device + ": UNEXPECTED INCONSISTENCY; RUN fsck MANUALLY.; (i.e., without -a or -p options)",
	} {
		if got := withoutNames(said, device); got != want {
			t.Errorf("%s\nis told as %s\nnot        %s", said, got, want)
		}
	}
	h := newHost(t)
	d := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), d, "ext4", nil))
	secret := filepath.Join(t.TempDir(), "salaries")
	must0(t, os.WriteFile(secret, []byte("much"), 0o600))
	command(t, "debugfs", "-w", "-R", "write "+secret+" salaries", d.Path)
	command(t, "debugfs", "-w", "-R", "clri salaries", d.Path)
	command(t, "debugfs", "-w", "-R", "set_super_value state 2", d.Path)
	var log strings.Builder
	must0(t, h.Check(klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(&log)))), d, "ext4"))
	if text := log.String(); !strings.Contains(text, "deleted/unused inode") || strings.Contains(text, "salaries") {
		t.Errorf("the log says %s", text)
	}
}

func TestCheckRefuses(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 300*mib))
	wantClass(t, h.Check(t.Context(), device, "ext4"), state.FailedPrecondition, "holds a blank device")
	wantClass(t, h.Check(t.Context(), device, "vfat"), state.InvalidArgument, "vfat", "use one of ext4, xfs, btrfs")
	must0(t, h.Format(t.Context(), device, "xfs", nil))
	wantClass(t, h.Check(t.Context(), device, "ext4"), state.FailedPrecondition, "holds xfs file system")
	wantClass(t, h.Check(t.Context(), device, "xfs"), state.FailedPrecondition, "xfs_repair")
	device.ReadOnly = true
	wantClass(t, h.Check(t.Context(), device, "xfs"), state.FailedPrecondition, "read-only")
}

// A mounted file system is never checked.
func TestCheckMounted(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	must0(t, h.Format(t.Context(), device, "ext4", nil))
	mount(t, device, "ext4")
	wantClass(t, h.Check(t.Context(), device, "ext4"), state.Unavailable, "e2fsck failed with exit code 8", "is mounted")
}

func BenchmarkProbe(b *testing.B) {
	h := newHost(b)
	for _, fsType := range h.Types() {
		device := attach(b, newImage(b, 320*mib))
		must0(b, h.Format(b.Context(), device, fsType, nil))
		b.Run(fsType, func(b *testing.B) {
			for b.Loop() {
				probe(b, h, device, "")
			}
		})
		dir := mount(b, device, fsType)
		b.Run(fsType+"/mounted", func(b *testing.B) {
			for b.Loop() {
				probe(b, h, device, dir)
			}
		})
	}
}

// What a user writes makes no volume something else: an xfs gives the end of its head to the first
// files, and a small ext4 has inodes there, with what symbolic links lead to.
func TestFilesLikeSignatures(t *testing.T) {
	h := newHost(t)
	page := bytes.Repeat([]byte{'x'}, 4096)
	copy(page[4096-10:], "SWAPSPACE2")
	link := strings.Repeat("x", 12) + "ReIsErFs"
	for fsType, c := range map[string]struct {
		size   int64
		offset int64
		magic  string
		fill   func(dir string)
	}{
		"xfs": {300 * mib, 64<<10 - 10, "SWAPSPACE2", func(dir string) {
			must0(t, os.WriteFile(filepath.Join(dir, "file"), bytes.Repeat(page, 6), 0o600))
		}},
		"ext4": {16 * mib, 64<<10 + 52, "ReIsErFs", func(dir string) {
			for i := 0; os.Symlink(link, filepath.Join(dir, strconv.Itoa(i))) == nil; i++ { // until there is no inode
			}
		}},
	} {
		t.Run(fsType, func(t *testing.T) {
			device := formatted(t, h, fsType, c.size)
			dir := mount(t, device, fsType)
			c.fill(dir)
			unmount(t, dir)
			if got := readAt(t, device.Path, c.offset, int64(len(c.magic))); string(got) != c.magic {
				t.Errorf("%q is at byte %d", got, c.offset)
			}
			wantProbe(t, h, device, state.ContentsFilesystem, fsType)
		})
	}
}

// resize2fs grows an ext4 with clusters only while it is mounted.
func TestGrowOfClusters(t *testing.T) {
	h := newHost(t)
	image := newImage(t, 64*mib)
	command(t, "mkfs.ext4", "-q", "-O", "bigalloc", image)
	must0(t, os.Truncate(image, 3<<30))
	if c := probe(t, h, attach(t, image), ""); !c.Growable || c.GrowsUnmounted {
		t.Errorf("%+v", c)
	}
}
