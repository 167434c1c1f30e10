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

// A claim that this process has ended lives on for a moment in a program that was being
// started meanwhile: a child has all files of its parent from its fork to its exec. The
// kernel wakes nobody when it ends, so the device is asked again at pauses that double.
const (
	firstPause = time.Millisecond
	lastPause  = 16 * time.Millisecond
)

// Claim opens a block device O_EXCL by open. If somebody has it claimed, that is waited
// for, for 31 ms, unless the kernel names the device that is stacked on it.
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
