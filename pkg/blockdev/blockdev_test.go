package blockdev_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var ok, wantError = require.NoError, require.Class

var _ interface {
	devices.Viewer
	devices.Holder
} = (*blockdev.Devices)(nil)

const size = 4 << 20 // bytes of a disk

// disk returns a block device that the plugin did not attach, and its file.
func disk(t *testing.T) (d state.Device, image string) {
	t.Helper()
	machine.Kernel(t)
	image = filepath.Join(t.TempDir(), "disk")
	ok(t, os.WriteFile(image, bytes.Repeat([]byte("disk"), size/4), 0o600))
	path := machine.Losetup(t, image)
	number, _ := devnode.NumberAt(path)
	return state.Device{State: state.DeviceAttached, Path: path, Number: number, Size: size}, image
}

// open returns what the plugin has after a start.
func open(t *testing.T) *blockdev.Devices {
	t.Helper()
	return blockdev.New(loops(t), nil)
}

func loops(t *testing.T) *loop.Devices {
	t.Helper()
	loops, err := loop.New(t.Context())
	ok(t, err)
	loops.Reserve(loop.Numbers{Bound: machine.Bound})
	return loops
}

func view(t *testing.T, b *blockdev.Devices, d state.Device, want state.DeviceState) state.Device {
	t.Helper()
	v, err := b.FindView(t.Context(), d)
	if err != nil || v.State != want {
		t.Fatalf("the view of %s: %+v, %v; want %s", d.Path, v, err, want)
	}
	return v
}

// attachView attaches a view that goes with the test.
func attachView(t *testing.T, b *blockdev.Devices, d state.Device) state.Device {
	t.Helper()
	ok(t, b.AttachView(t.Context(), d))
	v := view(t, b, d, state.DeviceAttached)
	t.Cleanup(func() {
		_, err := machine.Detach(v.Path, d.Path)
		ok(t, err)
	})
	return v
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	ok(t, err)
	return data
}

// Another's loop device over the device is no view.
func TestForeignLoopDeviceIsNoView(t *testing.T) {
	d, _ := disk(t)
	other := machine.Losetup(t, "-r", d.Path)
	b := open(t)
	view(t, b, d, state.DeviceAbsent)
	if v := attachView(t, b, d); v.Path == other {
		t.Errorf("%s passes for a view", other)
	}
	ok(t, b.DetachView(t.Context(), d))
	if backing, err := os.ReadFile("/sys/block/" + filepath.Base(other) + "/loop/backing_file"); err != nil || strings.TrimSpace(string(backing)) != d.Path {
		t.Errorf("%s shows %q, %v", other, backing, err)
	}
}

// The view of a volume that is published gets back the number that pods have.
func TestViewGetsItsNumberBack(t *testing.T) {
	d, _ := disk(t)
	loops := loops(t)
	var published []state.DeviceNumber
	loops.Reserve(loop.Numbers{
		Owner: func(n state.DeviceNumber) string {
			if len(published) > 0 && n == published[0] {
				return "vol"
			}
			return ""
		},
		Bound: machine.Bound,
		Published: func(volume string, view bool) []state.DeviceNumber {
			if volume == "vol" && view {
				return published
			}
			return nil
		},
	})
	b := blockdev.New(loops, func(n state.DeviceNumber) string {
		if n == d.Number {
			return "vol"
		}
		return ""
	})
	published = []state.DeviceNumber{machine.FreeLoop(t)} // which nobody else is given
	if v := attachView(t, b, d); v.Number != published[0] {
		t.Errorf("the view is %s, and was published as %s", v.Number, published[0])
	}
	ok(t, b.DetachView(t.Context(), d))
}

func TestViewOfAnotherDeviceThanMeantIsRefused(t *testing.T) {
	d, _ := disk(t)
	meant := d
	meant.Number.Minor += 1000
	b := open(t)
	wantError(t, b.AttachView(t.Context(), meant), state.Unavailable, d.Path, "not the device")
	view(t, b, d, state.DeviceAbsent)
}

// Another device that got the number since it was found is not shown.
func TestViewOfANumberThatIsAnotherDevice(t *testing.T) {
	d, _ := disk(t)
	_, other := disk(t)
	info, err := blockdev.Look(d.Path)
	ok(t, err)
	d.Identity = info.Identity()
	machine.LosetupDetach(t, d.Path)
	machine.Command(t, "losetup", d.Path, other)
	t.Cleanup(func() { machine.LosetupDetach(t, d.Path) })
	b := open(t)
	t.Cleanup(func() { ok(t, b.DetachView(context.Background(), d)) })
	wantError(t, b.AttachView(t.Context(), d), state.Unavailable, d.Path, "not the device", d.Identity)
	view(t, b, d, state.DeviceAbsent)
	info, err = blockdev.Look(d.Path)
	ok(t, err)
	d.Identity = info.Identity()
	ok(t, b.AttachView(t.Context(), d))
	view(t, b, d, state.DeviceAttached)
}

func TestHeld(t *testing.T) {
	d, _ := disk(t)
	b := open(t)
	mustBe := func(want bool) {
		t.Helper()
		if held, err := b.Held(t.Context(), d); err != nil || held != want {
			t.Errorf("held: %t, %v; want %t", held, err, want)
		}
	}
	mustBe(false)
	release := devicestest.Hold(t, d.Path)
	mustBe(true)
	release()
	mustBe(false)
	reader, err := os.Open(d.Path)
	ok(t, err)
	mustBe(false) // open is not claimed
	if names := process.Openers(t.Context(), d.Number); !strings.Contains(names, fmt.Sprintf("process %d (", os.Getpid())) {
		t.Errorf("%s is open by %s", d.Path, names)
	}
	info, err := blockdev.InfoOf(d.Number)
	ok(t, err)
	if users, want := info.Users(t.Context()), fmt.Sprintf("it is mounted in another mount namespace, or open in process %d (", os.Getpid()); !strings.HasPrefix(users, want) {
		t.Errorf("%s is used so: %s", d.Path, users)
	}
	ok(t, reader.Close())
	if _, err := b.Held(t.Context(), state.Device{Path: "/dev/none", Number: state.DeviceNumber{Major: 7, Minor: 1 << 19}}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a device that is not there: %v", err)
	}
}

func TestZero(t *testing.T) {
	d, image := disk(t)
	f, err := os.OpenFile(d.Path, os.O_RDWR|unix.O_EXCL, 0)
	ok(t, err)
	ok(t, blockdev.Zero(t.Context(), f, d.Size, nil))
	ok(t, f.Close())
	for _, path := range []string{image, d.Path} {
		if got := read(t, path); len(got) != size || len(bytes.Trim(got, "\x00")) > 0 {
			t.Errorf("%s holds more than zeros", path)
		}
	}
}
