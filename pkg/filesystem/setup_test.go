package filesystem

import (
	"errors"
	"io"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/digest"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var must0, wantClass = require.NoError, require.Class

const mib = 1 << 20

func newHost(t testing.TB) *Host {
	t.Helper()
	h, err := New(2)
	require.NoError(t, err)
	return h
}

// attach puts a loop device over a file until the test ends. Its Backing is set.
func attach(t testing.TB, path string, options ...string) state.Device {
	t.Helper()
	machine.Kernel(t)
	node := machine.Losetup(t, append(options, path)...)
	return deviceOf(t, node, path)
}

func deviceOf(t testing.TB, node, backing string) state.Device {
	t.Helper()
	d, err := open(state.Device{Path: node}, 0)
	must0(t, err)
	defer d.Close()
	return state.Device{State: state.DeviceAttached, Path: node, Number: d.number, Size: d.bytes, Capacity: d.bytes, Backing: backing}
}

// resize gives the file behind a loop device another size, and the device too.
func resize(t testing.TB, device state.Device, size int64) state.Device {
	t.Helper()
	must0(t, os.Truncate(device.Backing, size))
	command(t, "losetup", "--set-capacity", device.Path)
	return deviceOf(t, device.Path, device.Backing)
}

// mount mounts a device until the test ends.
func mount(t testing.TB, device state.Device, fsType string) string {
	t.Helper()
	dir := t.TempDir()
	must0(t, unix.Mount(device.Path, dir, fsType, 0, ""))
	t.Cleanup(func() {
		if err := machine.Unmount(dir); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Error(err)
		}
	})
	return dir
}

func unmount(t testing.TB, dir string) {
	t.Helper()
	must0(t, machine.Unmount(dir))
}

var command, newImage = machine.Command, machine.Image

// write puts bytes at an offset of a file; a negative offset counts from its end.
func write(t testing.TB, path string, offset int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must0(t, err)
	if offset < 0 {
		end, err := f.Seek(0, io.SeekEnd)
		must0(t, err)
		offset += end
	}
	_, err = f.WriteAt(b, offset)
	must0(t, err)
	must0(t, f.Sync()) // or the kernel writes it later, over what was written with O_DIRECT since
	must0(t, f.Close())
}

// dataOf returns where a file has data.
func dataOf(t testing.TB, f *os.File, size int64) (extents []extent) {
	t.Helper()
	d := &device{File: f, bytes: size}
	must0(t, d.eachData(t.Context(), func(e extent) bool { extents = append(extents, e); return true }))
	return extents
}

func probe(t testing.TB, h *Host, device state.Device, mountpoint string) state.Contents {
	t.Helper()
	c, err := h.Probe(t.Context(), device, mountpoint)
	must0(t, err)
	return c
}

// wantProbe fails the test unless a look at a device that is not mounted finds contents of
// that kind, in words that hold those.
func wantProbe(t testing.TB, h *Host, device state.Device, kind state.ContentsKind, words string) {
	t.Helper()
	if c := probe(t, h, device, ""); c.Kind != kind || !strings.Contains(c.Found, words) {
		t.Errorf("found %+v, want %s %q", c, kind, words)
	}
}

// probesBusy looks so often at a device that is mounted, while it is changed again and again.
func probesBusy(t *testing.T, h *Host, device state.Device, dir string, looks int, change func(i int) error) {
	t.Helper()
	stop, stopped := make(chan struct{}), make(chan error, 1)
	go func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				stopped <- nil
				return
			default:
			}
			if err := change(i); err != nil {
				stopped <- err
				return
			}
		}
	}()
	for range looks {
		if c := probe(t, h, device, dir); c.Kind != state.ContentsFilesystem {
			t.Errorf("%+v", c)
			break
		}
	}
	close(stop)
	must0(t, <-stopped)
}

// unchanged runs f and fails when the file is another one afterwards.
func unchanged(t testing.TB, path string, f func()) {
	t.Helper()
	before := digest.Of(t, path)
	f()
	if before != digest.Of(t, path) {
		t.Errorf("%s was written to", path)
	}
}

var script = machine.Script
