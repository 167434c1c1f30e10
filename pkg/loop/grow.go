package loop

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Grow lets the device that stands for a target, if it is the plugin's, take the
// size of its backing, which has at least so many bytes, and then its view.
// A device may be grown while it is mounted.
func (s *Devices) Grow(ctx context.Context, t Target, bytes int64) error {
	d, err := s.Recall(ctx, t)
	if d == nil || err != nil || !t.Owns(d) {
		return err
	}
	if err := setCapacity(d.name); err != nil {
		return err
	}
	after, err := ask(d.name)
	switch {
	case err != nil:
		return err
	case after == nil || after.bytes < bytes:
		return fmt.Errorf("%s did not take the size of %d bytes", d.Path(), bytes)
	case t.isView():
		return nil
	}
	return s.Grow(ctx, ViewOf(d.number), bytes)
}

// setCapacity makes a device as large as what backs it is now.
func setCapacity(name string) error {
	f, err := open(name, os.O_RDONLY)
	if err != nil {
		return err
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_SET_CAPACITY, 0); err != nil {
		return errors.Join(&os.PathError{Op: "LOOP_SET_CAPACITY", Path: f.Name(), Err: err}, f.Close())
	}
	return f.Close()
}
