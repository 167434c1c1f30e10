package mounts

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var must, wantClass = require.NoError, require.Class

// newHost returns a Host on a directory of the test, below which nothing stays
// mounted.
func newHost(t testing.TB) (*Host, string) {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	h, err := New(root)
	must(t, err)
	t.Cleanup(func() { unmountBelow(t, root) })
	return h, root
}

// bothTables runs a test once with each way to read the mount table that this
// kernel has.
func bothTables(t *testing.T, test func(t *testing.T, h *Host, root string)) {
	if h, err := New(t.TempDir()); err != nil {
		t.Fatal(err)
	} else if _, ok := h.table.(statmountTable); !ok && machine.Missing() == "" && !kernelBefore(t, 6, 13) {
		t.Fatal("this kernel has all of statmount(2), and it is not used")
	} else if ok {
		t.Run("statmount", func(t *testing.T) {
			h, root := newHost(t)
			test(t, h, root)
		})
	}
	t.Run("mountinfo", func(t *testing.T) {
		h, root := newHost(t)
		h.table = mountinfoTable{}
		test(t, h, root)
	})
}

func unmountBelow(t testing.TB, root string) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(root))
	must(t, err)
	for _, i := range slices.Backward(infos) {
		if err := unix.Unmount(i.Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil {
			t.Errorf("clean up %q: %v", i.Mountpoint, err)
		}
	}
}

// newDevice returns a loop device with a file system on it; "" leaves it blank.
func newDevice(t testing.TB, root, fsType string) state.Device {
	t.Helper()
	size := int64(16 << 20)
	switch fsType {
	case "xfs":
		size = 300 << 20 // mkfs.xfs makes nothing smaller
	case "btrfs":
		size = 128 << 20 // nor does mkfs.btrfs, much
	}
	image := machine.Image(t, size)
	if fsType != "" {
		machine.Mkfs(t, fsType, "-q", image)
	}
	return attach(t, root, image)
}

// attach puts a loop device over an image until the test ends.
func attach(t testing.TB, root, image string, options ...string) state.Device {
	t.Helper()
	machine.Kernel(t)
	path := machine.Losetup(t, append(options, image)...)
	t.Cleanup(func() { unmountBelow(t, root) })
	number, ok := devnode.NumberAt(path)
	if !ok {
		t.Fatalf("%s is no block device", path)
	}
	st, err := os.Stat(image)
	must(t, err)
	return state.Device{State: state.DeviceAttached, Path: path, Number: number, Size: st.Size(), Backing: image}
}

// mounted returns a staged ext4 and its device.
func mounted(t testing.TB, h *Host, path string) state.Device {
	t.Helper()
	return mountedAs(t, h, path, "ext4")
}

func mountedAs(t testing.TB, h *Host, path, fsType string) state.Device {
	t.Helper()
	d := newDevice(t, h.real, fsType)
	must(t, h.MountDevice(t.Context(), d, path, fsType, state.Flags{}, false))
	return d
}

func mountTmpfs(t testing.TB, source, path string, flags uintptr) {
	t.Helper()
	machine.Kernel(t)
	must(t, os.MkdirAll(path, 0o750))
	must(t, unix.Mount(source, path, "tmpfs", flags, ""))
}

// start runs a program until the test ends and waits for its first line.
func start(t testing.TB, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(args[0], args[1:]...)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() { stop(cmd) })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		t.Fatalf("%q said %q: %v", args, line, err)
	}
	return cmd
}

// waiting returns a command that says that it is ready and then waits. It is
// the program itself that says so, so it has its final name by then.
func waiting(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ready")
	must(t, os.WriteFile(path, []byte("ready\n"), 0o600))
	return "tail -n 1 -f " + path
}

// stop kills a program that start began; again is no harm.
func stop(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // it may have ended already
	_ = cmd.Wait()         // of a killed program it is always an error
}

// wantMount fails the test unless one mount of the device is at path.
func wantMount(t testing.TB, h *Host, path string, device state.DeviceNumber) state.Mount {
	t.Helper()
	m, err := h.Look(t.Context(), path, hang.NoLimit)
	must(t, err)
	if len(m.Mounts) != 1 || !m.Mounts[0].Is(device) {
		t.Fatalf("%s: %+v, want one mount of %s", path, m, device)
	}
	return m.Mounts[0]
}

// wantFile fails the test unless nothing is mounted at path and a file of the
// type is there.
func wantFile(t testing.TB, h *Host, path string, want state.FileType) {
	t.Helper()
	m, err := h.Look(t.Context(), path, hang.NoLimit)
	must(t, err)
	if len(m.Mounts) != 0 || m.File != want {
		t.Errorf("%s: %+v, want %s and no mount", path, m, want)
	}
}

var run = machine.Command

func tryRun(args ...string) (string, error) {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

func mustBe[T comparable](t testing.TB, what string, got, want T) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %v, want %v", what, got, want)
	}
}

// kernelBefore reports whether the kernel is older than major.minor.
func kernelBefore(t testing.TB, major, minor int) bool {
	t.Helper()
	var uts unix.Utsname
	must(t, unix.Uname(&uts))
	var is [2]int
	_, err := fmt.Sscanf(unix.ByteSliceToString(uts.Release[:]), "%d.%d", &is[0], &is[1])
	must(t, err)
	return slices.Compare(is[:], []int{major, minor}) < 0
}
