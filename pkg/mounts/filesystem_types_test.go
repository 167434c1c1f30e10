package mounts

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/machine"
)

// noRecovery are the options with which a read-only mount leaves the log alone, by
// the type of file system.
var noRecovery = map[string]string{"ext4": "noload", "xfs": "norecovery", "btrfs": "rescue=nologreplay"}

// written writes a file through to the log, and returns a copy of the image:
// what a machine that dies now would leave.
func written(t *testing.T, d state.Device, dir, name, text string) string {
	t.Helper()
	f, err := os.Create(filepath.Join(dir, name))
	must(t, err)
	_, err = f.WriteString(text)
	must(t, err)
	must(t, f.Sync())
	must(t, f.Close())
	image := filepath.Join(t.TempDir(), "copy")
	run(t, "cp", "--sparse=always", d.Backing, image)
	return image
}

func mustRead(t *testing.T, want string, path ...string) {
	t.Helper()
	got, err := os.ReadFile(filepath.Join(path...))
	if err != nil || string(got) != want {
		t.Errorf("%s: %q, %v; want %q", filepath.Join(path...), got, err, want)
	}
}

// A copy of a file system can be mounted beside it, and each shows its own data.
func TestMountCopies(t *testing.T) {
	for fsType := range noRecovery {
		t.Run(fsType, func(t *testing.T) {
			bothTables(t, func(t *testing.T, h *Host, root string) {
				ctx, first, second := t.Context(), filepath.Join(root, "first"), filepath.Join(root, "second")
				d := mountedAs(t, h, first, fsType)
				c := attach(t, root, written(t, d, first, "file", "both"))
				err := h.MountDevice(ctx, c, second, fsType, state.Flags{}, false)
				if fsType == "btrfs" && !mountsCopies(t) {
					wantClass(t, err, state.Unavailable, "a copy of the file system mounted", "before 6.7")
					wantFile(t, h, second, state.NoFile)
					must(t, h.Unmount(ctx, first))
					err = h.MountDevice(ctx, c, second, fsType, state.Flags{}, false)
					must(t, err)
					wantMount(t, h, second, c.Number)
					return
				}
				must(t, err)
				wantMount(t, h, first, d.Number)
				wantMount(t, h, second, c.Number)
				must(t, os.WriteFile(filepath.Join(second, "file"), []byte("copy"), 0o600))
				target := filepath.Join(root, "target")
				must(t, h.BindMount(ctx, second, c.Number, target, state.Flags{Set: state.ReadOnly}))
				wantClass(t, h.BindMount(ctx, second, d.Number, target+"2", state.Flags{}), state.FailedPrecondition, "not mounted with the volume's device "+d.Number.String())
				mustRead(t, "both", first, "file")
				mustRead(t, "copy", target, "file")
				must(t, h.Unmount(ctx, first))
				must(t, h.Unmount(ctx, target))
				must(t, h.Unmount(ctx, second))
				wantFree(t, d)
				wantFree(t, c)
			})
		})
	}
}

// mountsCopies reports whether the kernel mounts copies of a btrfs (Linux 6.7).
func mountsCopies(t *testing.T) bool {
	t.Helper()
	_, err := os.Stat("/sys/fs/btrfs/features/temp_fsid")
	return err == nil
}

// A read-only mount writes nothing, so it cannot replay a log.
func TestReadOnlyMountWithALog(t *testing.T) {
	for fsType, noRecovery := range noRecovery {
		t.Run(fsType, func(t *testing.T) {
			h, root := newHost(t)
			ctx, path := t.Context(), filepath.Join(root, "stage")
			d := mountedAs(t, h, path, fsType)
			must(t, os.WriteFile(filepath.Join(path, "older"), []byte("settled"), 0o600))
			must(t, h.Unmount(ctx, path))
			must(t, h.MountDevice(ctx, d, path, fsType, state.Flags{}, false))
			image := written(t, d, path, "file", "in the log")
			must(t, h.Unmount(ctx, path)) // or a kernel before 6.7 mounts no copy of a btrfs
			without := state.Flags{Super: []string{noRecovery}}
			before := digest.Of(t, image)

			reader := attach(t, root, image, "--read-only")
			wantClass(t, h.MountDevice(ctx, reader, path, fsType, state.Flags{}, true), state.FailedPrecondition,
				"its log must be replayed", "stage the volume once for writing", fmt.Sprintf("the mount flag %q", noRecovery))
			wantFile(t, h, path, state.Directory)
			must(t, h.MountDevice(ctx, reader, path, fsType, without, true))
			mustRead(t, "settled", path, "older")
			must(t, h.Unmount(ctx, path))
			mustBe(t, "the image", digest.Of(t, image), before)

			writer := attach(t, root, image)
			wantClass(t, h.MountDevice(ctx, writer, path, fsType, without, false), state.InvalidArgument,
				fmt.Sprintf("%q for a mount that may write", noRecovery), "invalid argument", "("+map[bool]string{true: "device "}[fsType == "btrfs"]+filepath.Base(writer.Path))
			must(t, h.MountDevice(ctx, writer, path, fsType, state.Flags{}, false))
			mustRead(t, "in the log", path, "file")
			must(t, h.Unmount(ctx, path))

			reader = attach(t, root, image, "--read-only")
			must(t, h.MountDevice(ctx, reader, path, fsType, state.Flags{}, true))
			mustRead(t, "in the log", path, "file")
		})
	}
}

// To find out what is wrong with an option, nothing is mounted with its log.
func TestRefusedOptionsLeaveTheLogAlone(t *testing.T) {
	for fsType, wrong := range map[string]string{"ext4": "sb=4096", "xfs": "logbsize=3"} {
		h, root := newHost(t)
		path := filepath.Join(root, "stage")
		image := written(t, mountedAs(t, h, path, fsType), path, "file", "in the log")
		must(t, h.Unmount(t.Context(), path))
		before := digest.Of(t, image)
		d := attach(t, root, image)
		flags := state.Flags{Super: []string{noRecovery[fsType], wrong}}
		wantClass(t, h.MountDevice(t.Context(), d, path, fsType, flags, true), state.InvalidArgument, "the kernel refuses", strings.Split(wrong, "=")[0])
		run(t, "blockdev", "--flushbufs", d.Path)
		mustBe(t, "the image of an "+fsType, digest.Of(t, image), before)
	}
}

// A btrfs is mounted whole, whatever its default subvolume, and nothing else is
// taken for the volume.
func TestBtrfsSubvolumes(t *testing.T) {
	bothTables(t, func(t *testing.T, h *Host, root string) {
		ctx, path, target := t.Context(), filepath.Join(root, "stage"), filepath.Join(root, "target")
		d := mountedAs(t, h, path, "btrfs")
		sub := filepath.Join(path, "sub")
		run(t, "btrfs", "subvolume", "create", sub)
		run(t, "btrfs", "subvolume", "set-default", sub)
		must(t, os.Mkdir(target, 0o750))
		must(t, unix.Mount(sub, target, "", unix.MS_BIND, ""))
		m, err := h.Look(ctx, target, hang.NoLimit)
		must(t, err)
		if len(m.Mounts) != 1 || m.Mounts[0].Is(d.Number) || m.Mounts[0].Device != d.Number || m.Mounts[0].Root != "/sub" {
			t.Errorf("a bind of a subvolume: %+v", m)
		}
		wantClass(t, h.BindMount(ctx, sub, d.Number, filepath.Join(root, "other"), state.Flags{}), state.FailedPrecondition, "no mount point")
		wantClass(t, h.BindMount(ctx, target, d.Number, filepath.Join(root, "other"), state.Flags{}), state.FailedPrecondition, `shows "/sub"`)
		must(t, h.Unmount(ctx, target))
		must(t, h.Unmount(ctx, path))

		for _, option := range []string{"subvol=sub", "subvolid=256", "device=/dev/null"} {
			_, err := state.ParseFlags([]string{option})
			wantClass(t, err, state.InvalidArgument, state.OptionName(option), "a volume is")
		}
		must(t, h.MountDevice(ctx, d, path, "btrfs", state.Flags{}, false))
		wantMount(t, h, path, d.Number)
		if _, err := os.Stat(sub); err != nil {
			t.Error(err)
		}
	})
}

// Only who asks for it gets discards, which punch holes into thick volumes.
func TestBtrfsDiscards(t *testing.T) {
	h, root := newHost(t)
	path := filepath.Join(root, "stage")
	d := newDevice(t, root, "btrfs")
	for _, asked := range []string{"", "discard", "discard=async"} {
		flags, err := state.ParseFlags([]string{asked})
		must(t, err)
		must(t, h.MountDevice(t.Context(), d, path, "btrfs", flags, false))
		stack, err := stackAt(path)
		must(t, err)
		if discards := strings.Contains(stack[0].options, "discard"); discards != (asked != "") {
			t.Errorf("asked for %q: %s", asked, stack[0].options)
		}
		must(t, h.Unmount(t.Context(), path))
	}
}

// The kernel remembers the devices of btrfs that it has seen. That keeps none
// from being mounted when a loop device shows another volume, an older copy
// of the volume, or the volume is another loop device.
func TestBtrfsDevicesReused(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	images := map[string]string{}
	for _, name := range []string{"one", "two"} {
		images[name] = filepath.Join(t.TempDir(), name)
		must(t, os.WriteFile(images[name], nil, 0o600))
		must(t, os.Truncate(images[name], 128<<20))
		machine.Mkfs(t, "btrfs", "-q", images[name])
	}
	images["copy of one"] = filepath.Join(t.TempDir(), "copy")
	run(t, "cp", "--sparse=always", images["one"], images["copy of one"])
	use := func(name string, d state.Device) {
		t.Helper()
		run(t, "btrfs", "device", "scan", d.Path) // as udev does
		must(t, h.MountDevice(ctx, d, path, "btrfs", state.Flags{}, false))
		wantMount(t, h, path, d.Number)
		must(t, os.WriteFile(filepath.Join(path, name), nil, 0o600))
		must(t, h.Unmount(ctx, path))
		wantFree(t, d)
	}
	for _, name := range []string{"one", "one", "two", "copy of one", "one", "two"} {
		sameDevice(t, images[name], func(d state.Device) { use(name, d) })
	}
	use("elsewhere", attach(t, root, images["one"]))
}

// sameDevice attaches an image to the same loop device as the last time, for the
// time of use. That has a number of its own, which is free for others between
// two times, so it may be lost, to be waited for.
func sameDevice(t *testing.T, image string, use func(state.Device)) {
	t.Helper()
	machine.Kernel(t)
	number := 1<<17 + os.Getpid()%1024
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	must(t, err)
	defer control.Close()
	if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number); err != nil && err != unix.EEXIST {
		t.Fatal(err)
	}
	t.Cleanup(func() { // once it succeeds; and not while somebody looks at the device
		if control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0); err == nil {
			_ = unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number)
			_ = control.Close()
		}
	})
	path := fmt.Sprintf("/dev/loop%d", number)
	out, err := tryRun("losetup", path, image)
	for strings.Contains(out, "busy") && t.Context().Err() == nil {
		out, err = tryRun("losetup", path, image)
	}
	if err != nil {
		t.Fatalf("losetup %s: %v: %s", path, err, out)
	}
	defer run(t, "losetup", "--detach", path)
	device, ok := devnode.NumberAt(path)
	mustBe(t, path+" is a block device", ok, true)
	use(state.Device{State: state.DeviceAttached, Path: path, Number: device, Backing: image})
}

// Whatever subvolume a process uses a btrfs in, a busy unmount names it.
func TestBusyBtrfsNamesTheProcess(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d := mountedAs(t, h, path, "btrfs")
	sub := filepath.Join(path, "sub")
	run(t, "btrfs", "subvolume", "create", sub)
	for _, dir := range []string{path, sub} {
		must(t, os.WriteFile(filepath.Join(dir, "file"), []byte("some bytes"), 0o600))
		for name, program := range map[string]string{
			"a working directory": "cd " + dir,
			"an open file":        "exec 5<" + dir + "/file",
		} {
			t.Run(name, func(t *testing.T) {
				cmd := start(t, "sh", "-c", program+"; exec "+waiting(t))
				wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by", fmt.Sprintf("pid %d (tail)", cmd.Process.Pid))
				stop(cmd)
			})
		}
	}
	f, err := os.Open(filepath.Join(sub, "file"))
	must(t, err)
	memory, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	must(t, err)
	must(t, f.Close())
	wantClass(t, h.Unmount(ctx, path), state.Unavailable, "in use by", fmt.Sprintf("pid %d", os.Getpid()))
	must(t, unix.Munmap(memory))
	must(t, h.Unmount(ctx, path))
	wantFree(t, d)
}
