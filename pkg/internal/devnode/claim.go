package devnode

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// A claim that this process has ended may live on for a moment in a program that is just
// being started: from its fork to its exec, a child has all files of its parent. The kernel
// wakes nobody when it ends, so the device is asked again at pauses that double.
const (
	firstPause = time.Millisecond
	lastPause  = 16 * time.Millisecond
)

// Claim opens a block device O_EXCL by calling open. If somebody has claimed it, Claim
// waits up to 31 ms for the end of that, unless the kernel names a device that is stacked
// on it.
//
// EBUSY: it is mounted or claimed.
func Claim(ctx context.Context, number state.DeviceNumber, open func() (*os.File, error)) (*os.File, error) {
	for pause := firstPause; ; pause *= 2 {
		f, err := open()
		if !errors.Is(err, unix.EBUSY) || pause > lastPause || hasHolders(number) {
			return f, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// hasHolders reports whether sysfs lists a device, such as one of the device mapper,
// that is stacked on a device.
func hasHolders(number state.DeviceNumber) bool {
	holders, err := os.ReadDir(filepath.Join("/sys/dev/block", number.String(), "holders"))
	return err == nil && len(holders) > 0
}
