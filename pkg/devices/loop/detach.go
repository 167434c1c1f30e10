package loop

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// goneLimit is how long a detach waits for others who have the device
	// open: udev and blkid open every device for a moment. The kernel wakes
	// nobody when the device goes, so it is looked at every goneInterval.
	goneLimit    = 500 * time.Millisecond
	goneInterval = 5 * time.Millisecond
)

// errHeld is in the errors of a detach that was refused or is not complete.
var errHeld = errors.New("still in use")

// Detach detaches the volume's device and returns nil when it is seen to be
// gone. It leaves a device alone that is mounted or claimed, or that another
// device is stacked on. A device that is merely open goes when the last one
// closes it; the error names who has it open until then. Foreign devices are
// left alone.
func (b *Backend) Detach(ctx context.Context, volume string) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	// The tag says which one is ours. The pool is not asked: it may be away.
	ours := b.stands(volume, nil)
	d, err := b.recall(ctx, b.tag(volume), sought{is: func(*device) bool { return true }, named: ours.named})
	if d != nil && !ours.is(d) {
		d, err = b.search(ctx, b.tag(volume), ours) // without forgetting the foreign one
		if d == nil && err == nil {
			return nil
		}
	}
	if err == nil {
		err = b.detach(ctx, b.tag(volume), ours)
	}
	if err != nil {
		return fmt.Errorf("volume %s: detach: %w", volume, err)
	}
	return nil
}

// detach releases the devices for a key that are ours until none is found.
func (b *Backend) detach(ctx context.Context, key string, ours sought) error {
	for {
		d, err := b.current(ctx, key, ours)
		if d == nil || err != nil {
			return err
		}
		if err := b.release(ctx, d); err != nil {
			return err
		}
		b.forget(key)
	}
}

// abandon detaches a device to attach it in another shape. It is kept if it
// does not go at once.
func (b *Backend) abandon(ctx context.Context, key string, d *device, solid bool) error {
	err := b.release(ctx, d)
	if err == nil {
		b.forget(key)
		return nil
	}
	if !d.detaching() {
		if now, asked := ask(d.name); asked != nil {
			err = errors.Join(err, asked)
		} else if now != nil && now.tag() == d.tag() && now.detaching() {
			err = errors.Join(err, b.reclaim(ctx, key, now, solid))
		}
	}
	if errors.Is(err, errHeld) {
		return state.Errorf(state.FailedPrecondition, "it is attached otherwise (read-only %t, sectors of %d bytes): %w", d.readOnly, d.sector, err)
	}
	return err
}

// release clears a device and sees that it is gone.
func (b *Backend) release(ctx context.Context, d *device) error {
	unlock, err := b.nodes.Lock(ctx, d.name)
	if err != nil {
		return err
	}
	defer unlock()
	gone, err := b.clear(ctx, d)
	if err != nil || gone {
		return err
	}
	return awaitGone(ctx, d)
}

// clear tells the kernel to let go of the backing, unless the device is in
// use. From the O_EXCL open on nobody can mount it. LOOP_CLR_FD detaches when
// the last one closes the device, which is this function if all is well.
func (b *Backend) clear(ctx context.Context, d *device) (gone bool, err error) {
	f, err := open(d.name, os.O_RDONLY|unix.O_EXCL)
	switch {
	case errors.Is(err, unix.EBUSY):
		return false, fmt.Errorf("%s is %w: it is mounted or claimed, perhaps in another mount namespace", d, errHeld)
	case errors.Is(err, unix.ENXIO): // it is being cleared
		return false, nil
	case err != nil:
		return false, err
	}
	defer closeAfter(f, &err)
	now, err := describe(f, d.name)
	if err != nil && d.still(f) {
		now, err = d, nil
	}
	switch {
	case err != nil:
		return false, err
	case now == nil || now.tag() != d.tag() || now.file() != d.file():
		return true, nil
	}
	users, err := b.stackedOn(ctx, d)
	switch {
	case err != nil:
		return false, err
	case len(users) > 0:
		return false, fmt.Errorf("%s is %w by %s", d, errHeld, strings.Join(users, ", "))
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return false, &os.PathError{Op: "LOOP_CLR_FD", Path: d.path(), Err: err}
	}
	return false, nil
}

// awaitGone waits a moment for a cleared device to be gone.
func awaitGone(ctx context.Context, d *device) error {
	limit := time.NewTimer(goneLimit)
	defer limit.Stop()
	again := time.NewTicker(goneInterval)
	defer again.Stop()
	for {
		if now, err := ask(d.name); err != nil {
			return err
		} else if isFree(d.name) || now != nil && (now.tag() != d.tag() || now.file() != d.file()) {
			return nil
		}
		select {
		case <-again.C:
		case <-ctx.Done():
			return fmt.Errorf("%s is %w: %w", d, errHeld, ctx.Err())
		case <-limit.C:
			return fmt.Errorf("%s is %w, and goes when it is closed by %s", d, errHeld, openers(ctx, d.number))
		}
	}
}

// stackedOn names the devices over d: loop devices, and what sysfs lists as
// holders (device-mapper, md, bcache).
func (b *Backend) stackedOn(ctx context.Context, d *device) ([]string, error) {
	var users []string
	if view, err := b.recall(ctx, viewKey(d.number), showing(d.number)); err != nil {
		return nil, err
	} else if view != nil {
		users = append(users, view.String())
	}
	all, silent, err := b.scan(ctx)
	if err != nil {
		return nil, err
	}
	for _, other := range all {
		if other.over() == d.number {
			users = append(users, other.String())
		}
	}
	users = append(users, showing(d.number).among(silent)...)
	holders, err := os.ReadDir(filepath.Join(sysBlock, d.name, "holders"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, holder := range holders {
		users = append(users, "/dev/"+holder.Name())
	}
	return users, nil
}
