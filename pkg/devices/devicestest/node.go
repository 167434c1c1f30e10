package devicestest

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// onNodes returns the harness with what it leaves out done by the devices' nodes.
func (h Harness) onNodes() Harness {
	if h.Hold == nil {
		h.Hold = func(t *testing.T, device state.Device) func() { return Hold(t, device.Path) }
	}
	if h.Write == nil {
		h.Write = write
	}
	if h.Read == nil {
		h.Read = read
	}
	return h
}

// Hold claims the device at a path as a mount does, until release or the end of the test.
func Hold(t testing.TB, path string) (release func()) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		t.Fatal(err)
	}
	release = func() {
		if err := f.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
			t.Error(err)
		}
	}
	t.Cleanup(release)
	return release
}

func write(t *testing.T, device state.Device, offset int64, data []byte) {
	t.Helper()
	f, err := os.OpenFile(device.Path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt(data, offset)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, device state.Device, offset int64, data []byte) {
	t.Helper()
	f, err := os.Open(device.Path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.ReadAt(data, offset)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}
