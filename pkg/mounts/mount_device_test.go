package mounts

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func TestMountDevice(t *testing.T) {
	for fsType := range noRecovery {
		t.Run(fsType, func(t *testing.T) {
			bothTables(t, func(t *testing.T, h *Host, root string) {
				d, path := newDevice(t, root, fsType), filepath.Join(root, "not/there yet")
				flags := state.Flags{Set: state.NoExec | state.NoAtime, Clear: state.AtimeMask}
				must(t, h.MountDevice(t.Context(), d, path, fsType, flags, false))
				wantLook(t, h, path, on(state.Mount{Device: d.Number, FSType: fsType, Source: d.Path, Root: "/", Attributes: state.NoExec | state.NoAtime}))
				must(t, os.WriteFile(filepath.Join(path, "file"), []byte("data"), 0o600))
				wantClass(t, h.MountDevice(t.Context(), d, path, fsType, flags, false), state.FailedPrecondition, "mount point already")
				must(t, h.Unmount(t.Context(), path))
				st, err := os.Stat(filepath.Dir(path))
				must(t, err)
				mustBe(t, "mode of a directory made on the way", st.Mode().Perm(), 0o750)

				must(t, h.MountDevice(t.Context(), d, path, fsType, state.Flags{}, true))
				wantLook(t, h, path, on(state.Mount{Device: d.Number, FSType: fsType, Source: d.Path, Root: "/", Attributes: state.ReadOnly, SuperReadOnly: true}))
				data, err := os.ReadFile(filepath.Join(path, "file"))
				must(t, err)
				mustBe(t, "the file", string(data), "data")
			})
		})
	}
}

// Whoever repeats the mount of a device that somebody has claimed must know it for that.
func TestMountDeviceOfAClaimedDeviceIsBusy(t *testing.T) {
	for fsType := range noRecovery {
		t.Run(fsType, func(t *testing.T) {
			h, root := newHost(t)
			d, path := newDevice(t, root, fsType), filepath.Join(root, "stage")
			claimed, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
			must(t, err)
			defer claimed.Close()
			if err := h.MountDevice(t.Context(), d, path, fsType, state.Flags{}, false); !errors.Is(err, unix.EBUSY) {
				t.Fatalf("%v", err)
			}
			must(t, claimed.Close())
			must(t, h.MountDevice(t.Context(), d, path, fsType, state.Flags{}, false))
		})
	}
}

func TestMountDeviceReadOnlyMountOfAWritableSuperblock(t *testing.T) {
	h, root := newHost(t)
	d, path := newDevice(t, root, "ext4"), filepath.Join(root, "stage")
	must(t, h.MountDevice(t.Context(), d, path, "ext4", state.Flags{Set: state.ReadOnly}, false))
	m := wantMount(t, h, path, d.Number)
	if m.SuperReadOnly || m.Attributes != state.ReadOnly {
		t.Errorf("%+v", m)
	}
}

func TestMountDeviceFailures(t *testing.T) {
	h, root := newHost(t)
	ctx, path := t.Context(), filepath.Join(root, "stage")
	d, other := newDevice(t, root, "ext4"), newDevice(t, root, "ext4")
	blank := newDevice(t, root, "")
	mixed := d
	mixed.Path = other.Path
	for name, c := range map[string]struct {
		device state.Device
		fsType string
		class  state.Class
		saying string
	}{
		"another file system":  {d, "xfs", state.Unavailable, "XFS (" + filepath.Base(d.Path) + "): Invalid superblock magic number"},
		"a blank device":       {blank, "ext4", state.Unavailable, "EXT4-fs (" + filepath.Base(blank.Path) + "): VFS: Can't find ext4 filesystem"},
		"no such file system":  {d, "nofs", state.FailedPrecondition, "nofs"},
		"another device there": {mixed, "ext4", state.Unavailable, other.Number.String()},
		"no node":              {state.Device{Path: root + "/none", Number: d.Number}, "ext4", state.Unavailable, d.Number.String()},
		"a file as a node":     {state.Device{Path: "/proc/version", Number: d.Number}, "ext4", state.Unavailable, "no block device"},
	} {
		t.Run(name, func(t *testing.T) {
			wantClass(t, h.MountDevice(ctx, c.device, path, c.fsType, state.Flags{}, false), c.class, c.saying, path)
			wantFile(t, h, path, state.NoFile)
		})
	}
	t.Run("a file at the path", func(t *testing.T) {
		must(t, os.WriteFile(path, nil, 0o600))
		wantClass(t, h.MountDevice(ctx, d, path, "ext4", state.Flags{}, false), state.FailedPrecondition, "is a file, not a directory")
		wantFile(t, h, path, state.RegularFile)
	})
	// Nothing that failed keeps the device.
	for _, d := range []state.Device{d, other, blank} {
		wantFree(t, d)
	}
}

// wantFree fails the test if anything holds the device.
func wantFree(t *testing.T, d state.Device) {
	t.Helper()
	if err := claim(d); err != nil {
		t.Errorf("%s is held: %v", d.Path, err)
	}
}

func claim(d state.Device) error {
	fd, err := unix.Open(d.Path, unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// Existing mounts on what is there, and makes nothing.
func TestExisting(t *testing.T) {
	h, root := newHost(t)
	d := newDevice(t, root, "ext4")
	e, ctx := h.Existing(), t.Context()
	stage, target, file := root+"/stage", root+"/target", root+"/file"
	for range 2 {
		for _, err := range []error{
			e.MountDevice(ctx, d, root+"/no/stage", "ext4", state.Flags{}, false),
			e.MountDevice(ctx, d, stage, "ext4", state.Flags{}, false),
			e.BindDevice(ctx, d, file),
		} {
			if !errors.Is(err, os.ErrNotExist) {
				t.Errorf("mounted on nothing: %v", err)
			}
		}
	}
	must(t, os.Mkdir(stage, 0o750))
	must(t, e.MountDevice(ctx, d, stage, "ext4", state.Flags{}, false))
	if err := e.BindMount(ctx, stage, d.Number, target, state.Flags{}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("bound on nothing: %v", err)
	}
	if left, err := os.ReadDir(root); err != nil || len(left) != 1 {
		t.Errorf("%v beside the stage (%v)", left, err)
	}
	must(t, os.Mkdir(target, 0o750))
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, e.BindMount(ctx, stage, d.Number, target, state.Flags{}))
	must(t, e.BindDevice(ctx, d, file))
}

// To mount is to write: the device is judged before.
func TestWrongNodeIsNotWrittenTo(t *testing.T) {
	h, root := newHost(t)
	d := newDevice(t, root, "ext4")
	before, err := os.ReadFile(d.Path)
	must(t, err)
	d.Number.Minor += 1000
	err = h.MountDevice(t.Context(), d, filepath.Join(root, "stage"), "ext4", state.Flags{}, false)
	wantClass(t, err, state.Unavailable, d.Path)
	after, err := os.ReadFile(d.Path)
	must(t, err)
	if !bytes.Equal(before, after) {
		t.Error("the device was written to")
	}
}

// What becomes of a device while it is mounted, it keeps its number: another one is not mounted
// in its place. The mount waits for a server that does not answer before the kernel has opened
// the device.
func TestMountDeviceHoldsTheDevice(t *testing.T) {
	h, root := newHost(t)
	d, dead := newDevice(t, root, "ext4"), filepath.Join(root, "dead")
	server := mountDead(t, dead)
	flags, mounted := state.Flags{Super: []string{"journal_path=" + dead + "/journal"}}, make(chan error, 1)
	go func() { mounted <- h.MountDevice(t.Context(), d, filepath.Join(root, "stage"), "ext4", flags, false) }()
	for since := time.Now(); !opened(t, d.Number); time.Sleep(time.Millisecond) {
		if time.Since(since) > 10*time.Second {
			t.Fatal("the device is not held")
		}
	}
	run(t, "losetup", "--detach", d.Path)
	if out, err := tryRun("losetup", d.Path, machine.Image(t, 1<<20)); err == nil {
		t.Error("its number was given to another device")
	} else if !strings.Contains(out, "busy") {
		t.Error(out)
	}
	must(t, server.Close())
	if err := <-mounted; err == nil {
		t.Error("it was mounted without a journal")
	}
	if !machine.AwaitDetached(d.Path, d.Backing) {
		t.Error("the device is still held")
	}
	wantClass(t, h.MountDevice(t.Context(), d, filepath.Join(root, "stage"), "ext4", state.Flags{}, false), state.Unavailable, d.Path, "detached")
}

// opened reports whether this process has a device open.
func opened(t *testing.T, device state.DeviceNumber) bool {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	return slices.ContainsFunc(fds, func(fd os.DirEntry) bool {
		number, ok := devnode.NumberAt("/proc/self/fd/" + fd.Name())
		return ok && number == device
	})
}

// A mount that shows another device than it should is given up.
func TestVerifySuper(t *testing.T) {
	for fsType := range noRecovery {
		h, root := newHost(t)
		d, other := newDevice(t, root, fsType), newDevice(t, root, fsType)
		mnt, err := newMount(d, fsType, state.Flags{}, false)
		must(t, err)
		must(t, verifySuper(mnt, d, fsType))
		wantClass(t, verifySuper(mnt, other, fsType), state.Unavailable, d.Number.String())
		must(t, unix.Close(mnt))
		wantFree(t, d)
		wantFile(t, h, filepath.Join(root, "stage"), state.NoFile)
	}
}
