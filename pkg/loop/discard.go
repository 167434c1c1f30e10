package loop

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
)

// A discard of a loop device punches holes into its backing: in this way a thin file
// gives back what the file system in it frees. A solid file must not lose blocks: its
// device's discard_max_bytes is 0, with which the driver refuses discards and whatever
// else would call fallocate on the file. A request for zeros is then served by writing
// zeros, which Linux 6.1 logs each time.
//
// That limit outlives the backing. From Linux 6.10 on even LOOP_CONFIGURE keeps
// it, and no write to sysfs takes it back, because the kernel then accepts no value
// but 0. The next solid file on that device needs no new setting, which saves 15 ms; for a
// thin one the device is made anew, which takes 40 ms. Other programs that get the device before that
// cannot discard on it.
const (
	discardMax   = "discard_max_bytes"    // that are in force, settable
	discardLimit = "discard_max_hw_bytes" // that the driver could do
)

// KeepSolid makes the device that stands for a target refuse discards, if it is
// writable: a crash may have come before it did.
func (s *Devices) KeepSolid(ctx context.Context, t Target) error {
	d, err := s.Recall(ctx, t)
	if d != nil && err == nil && t.Owns(d) && !d.readOnly {
		disableDiscard(ctx, d.name)
	}
	return err
}

// disableDiscard makes a device refuse discards. Where it cannot, such as in a
// container whose /sys is read-only because it is not the node's, even if the container
// is privileged, it says so in the log: the next attach allocates again what a discard
// took.
func disableDiscard(ctx context.Context, name string) {
	limit, err := readQueue(name, discardLimit)
	if err == nil && limit == 0 || discardDisabled(name) {
		return
	}
	if err := os.WriteFile(queueFile(name, discardMax), []byte("0"), 0); err != nil {
		klog.FromContext(ctx).Error(err, "A discard can take blocks from a solid backing until it is attached anew: mount the node's /sys into the plugin's container, as deploy/ does", "device", name)
	}
}

// discardDisabled reports whether a device, bound or not, refuses discards that
// its driver could do.
func discardDisabled(name string) bool {
	now, err := readQueue(name, discardMax)
	if err != nil || now > 0 {
		return false
	}
	limit, err := readQueue(name, discardLimit)
	return err == nil && limit > 0
}

// passedDiscards reports whether a device passed discards on when it was last attached here.
func (s *Devices) passedDiscards(name string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.discarding[name]
}

func (s *Devices) notePassesDiscards(name string, passes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if passes {
		s.discarding[name] = true
	} else {
		delete(s.discarding, name)
	}
}

// recreate makes a free device anew, without the limits that it was given. EBUSY:
// it is bound again, or open.
func recreate(name string) (err error) {
	number, err := strconv.Atoi(strings.TrimPrefix(name, "loop"))
	if err != nil {
		return err
	}
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(control, &err)
	if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number); err != nil {
		return fmt.Errorf("LOOP_CTL_REMOVE %d: %w", number, err)
	}
	if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("LOOP_CTL_ADD %d: %w", number, err)
	}
	return nil
}

// add makes a device with the lowest number that has no device.
func add(control *os.File) (number int, err error) {
	const any = ^uintptr(0) // -1
	n, _, errno := unix.Syscall(unix.SYS_IOCTL, control.Fd(), unix.LOOP_CTL_ADD, any)
	if errno != 0 {
		return 0, fmt.Errorf("LOOP_CTL_ADD: %w", errno)
	}
	return int(n), nil
}

func queueFile(name, file string) string { return filepath.Join(sysBlock, name, "queue", file) }

func readQueue(name, file string) (uint64, error) {
	raw, err := rawfile.ReadAttribute(queueFile(name, file))
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(raw)), 10, 64)
}
