// Package blockdev does what is the same for every block device, whichever backend attached
// it: it reads the device's identity, keeps read-only views of it, tells whether it is in
// use, and zeroes it.
//
// Read first: identity.go (which device is which), over sysfs.go. Then view.go and
// zero.go.
package blockdev

import (
	"context"
	"errors"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// Devices keeps views over block devices and tells who holds one: it is a
// devices.Viewer and a devices.Holder. Its methods may be called concurrently.
type Devices struct {
	loops    *loop.Devices
	volumeAt func(state.DeviceNumber) string
	turns    keylock.Map // of the views, by the number of the device
}

// New returns what works on the block devices of this node. volumeAt returns the volume
// that a device belongs to, "" if that is not known; with it, a view gets back the number
// with which the volume was published (loop.Numbers). It may be nil.
func New(loops *loop.Devices, volumeAt func(state.DeviceNumber) string) *Devices {
	if volumeAt == nil {
		volumeAt = func(state.DeviceNumber) string { return "" }
	}
	return &Devices{loops: loops, volumeAt: volumeAt}
}

// Held reports whether a device is claimed: mounted in whatever namespace, or opened O_EXCL
// (open(2): EBUSY). Asking claims the device for some microseconds, so only the volume's
// worker may ask.
func (b *Devices) Held(ctx context.Context, d state.Device) (held bool, err error) {
	f, done, err := b.claim(ctx, d)
	switch {
	case errors.Is(err, unix.EBUSY):
		return true, nil
	case errors.Is(err, unix.ENXIO): // a loop device that is being cleared
		return false, nil
	case err != nil:
		return false, err
	}
	defer done()
	return false, f.Close()
}

// claim opens a device O_EXCL by its node. The caller closes it before done.
func (b *Devices) claim(ctx context.Context, d state.Device) (f *os.File, done func(), err error) {
	path, number := d.Path, d.Number
	if !devnode.IsAt(path, number) { // a symbolic link, such as those of the device mapper, is not it
		if path, err = devnode.PathOf(number); err != nil {
			return nil, nil, err
		}
	}
	done, err = b.loops.Turn(ctx, filepath.Base(path))
	if err != nil {
		return nil, nil, err
	}
	f, err = devnode.Claim(ctx, number, func() (*os.File, error) { return devnode.Open(path, number, os.O_RDONLY|unix.O_EXCL) })
	if err != nil {
		done()
		return nil, nil, err
	}
	return f, done, nil
}

// SetReadOnly sets the mode of an open device, and returns the one that it has then: a
// device that takes no writes by itself stays read-only.
func SetReadOnly(f *os.File, readOnly bool) (is bool, err error) {
	mode := 0
	if readOnly {
		mode = 1
	}
	if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, mode); err != nil {
		return false, rawfile.PathError("BLKROSET", f, err)
	}
	mode, err = unix.IoctlGetInt(int(f.Fd()), unix.BLKROGET)
	return mode != 0, rawfile.PathError("BLKROGET", f, err)
}
