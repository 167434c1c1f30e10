package devnode

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// A claim that this process has ended may live on for a moment in a program that is just
// being started: from its fork until exec has closed them, a child has all files of its
// parent. Others claim a device for as long to see whether it is free. The kernel wakes
// nobody when that ends, so the device is asked again at pauses that double.
const (
	firstPause = time.Millisecond
	lastPause  = 16 * time.Millisecond
	claimTime  = 2*lastPause - firstPause
	// startTime bounds the wait while this process starts programs. On a busy node one
	// has taken 17 ms.
	startTime = 500 * time.Millisecond
)

// Claim opens a block device O_EXCL by calling open. If somebody has claimed it, Claim
// waits for the end of that: 31 ms, from when the programs run that this process was
// starting when it came, but no longer than some 500 ms. It does not wait if the kernel
// names a device that is stacked on it.
//
// EBUSY: it is mounted or claimed.
func Claim(ctx context.Context, number state.DeviceNumber, open func() (*os.File, error)) (*os.File, error) {
	limit, started := claimTime, false
	for waited, pause := time.Duration(0), firstPause; ; waited, pause = waited+pause, min(2*pause, lastPause) {
		if started = started || !starting(); !started { // to be known before the device is asked
			limit = min(waited+claimTime, startTime)
		}
		f, err := open()
		if !errors.Is(err, unix.EBUSY) || waited >= limit || hasHolders(number) {
			return f, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// starting reports whether this process is starting a program. Go keeps ForkLock until the
// child is in exec, as its fork is a vfork (vfork(2)).
func starting() bool {
	if !syscall.ForkLock.TryRLock() {
		return true
	}
	syscall.ForkLock.RUnlock()
	return false
}

// hasHolders reports whether sysfs lists a device, such as one of the device mapper,
// that is stacked on a device.
func hasHolders(number state.DeviceNumber) bool {
	holders, err := os.ReadDir(filepath.Join("/sys/dev/block", number.String(), "holders"))
	return err == nil && len(holders) > 0
}
