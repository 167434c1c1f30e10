package loop

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// FindView tells what read-only device of the plugin stands over a device.
func (b *Backend) FindView(ctx context.Context, over state.Device) (state.Device, error) {
	facts := state.Device{State: state.DeviceAbsent}
	d, err := b.recall(ctx, viewKey(over.Number), showing(over.Number))
	if err != nil {
		return facts, fmt.Errorf("view of %s: find: %w", over.Path, err)
	}
	if d != nil {
		d.facts(&facts)
	}
	return facts, nil
}

// AttachView attaches a read-only device over a device, with sectors of the same
// size, or reclaims the one that is there.
func (b *Backend) AttachView(ctx context.Context, over state.Device) error {
	key := viewKey(over.Number)
	done, err := b.turns.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer done()
	d, err := b.current(ctx, key, showing(over.Number))
	switch {
	case err != nil:
	case d == nil:
		err = b.attachView(ctx, key, over)
	case d.detaching():
		err = b.reclaim(ctx, key, d, false)
	}
	if err != nil {
		return fmt.Errorf("view of %s: attach: %w", over.Path, err)
	}
	return nil
}

func (b *Backend) attachView(ctx context.Context, key string, over state.Device) (err error) {
	backing, err := os.OpenFile(over.Path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer closeAfter(backing, &err)
	var st unix.Stat_t
	if err := unix.Fstat(int(backing.Fd()), &st); err != nil {
		return pathError("fstat", backing, err)
	}
	if numberOf(st.Rdev) != over.Number {
		return fmt.Errorf("%s is not the device %s any more", over.Path, over.Number)
	}
	sector, err := unix.IoctlGetInt(int(backing.Fd()), unix.BLKSSZGET)
	if err != nil {
		return pathError("BLKSSZGET", backing, err)
	}
	volume, err := b.over(ctx, over)
	if err != nil {
		return err
	}
	as := shape{readOnly: true, sector: sector}
	is := showing(over.Number).is
	return b.configure(ctx, receiver{volume: volume, view: true}, key, backing, viewTag, as, nil, func(d *device) bool { return is(d) && d.is(as) })
}

// DetachView detaches the view of a device; as for Detach, nil means that it
// was seen to be gone.
func (b *Backend) DetachView(ctx context.Context, over state.Device) error {
	key := viewKey(over.Number)
	done, err := b.turns.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer done()
	if err := b.detach(ctx, key, showing(over.Number)); err != nil {
		return fmt.Errorf("view of %s: detach: %w", over.Path, err)
	}
	return nil
}

func viewKey(over state.DeviceNumber) string { return "view of " + over.String() }

// showing returns what accepts the views of a device.
func showing(over state.DeviceNumber) sought {
	return sought{
		is: func(d *device) bool { return d.isView() && d.over() == over },
		named: func(backing string) bool { // by its last name: the path depends on who attached it, and where
			number, err := numberOfLoop(filepath.Base(strings.TrimSuffix(backing, deleted)))
			return backing == "" || err == nil && number == over
		},
	}
}

// deleted is what sysfs puts behind the path of a file that has none any more.
const deleted = " (deleted)"
