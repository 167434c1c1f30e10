package machine

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Unmount unmounts a path; no link is followed. What is busy for a moment is waited for,
// for a minute at most: whoever looks at the path just then keeps the mount, and so does a
// program that is being started, which until its exec has copies of all that this process
// had open, be it closed here since.
func Unmount(path string) error {
	for since := time.Now(); ; time.Sleep(time.Millisecond) {
		err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
		if err == nil || !errors.Is(err, unix.EBUSY) || time.Since(since) > time.Minute {
			if err != nil {
				return fmt.Errorf("unmount %s: %w", path, err)
			}
			return nil
		}
	}
}
