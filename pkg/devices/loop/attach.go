package loop

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices/internal/lease"
	"github.com/csi-node/csi-node/pkg/state"
)

// attachTries bounds the race for a free device with other processes.
const attachTries = 256

// shape is how a device shows its backing.
type shape struct {
	readOnly bool
	sector   int  // of the device, in bytes: a logical one
	solid    bool // writable, and a discard must not take blocks from the backing
}

// Attach attaches the volume, read-only or not, with the sectors that its
// metadata names. A device that is going away is reclaimed; one of another mode
// or sector size that nobody uses is attached anew. A thick volume gets back
// the blocks that it lacks before it is attached for writing, if there is room.
//
// NotFound: no such volume. FailedPrecondition: something else shows the data,
// the device is held in the other mode, or the data was truncated or replaced.
// Unavailable: somebody has the file open, and a loop device that does not answer
// may be it.
func (b *Backend) Attach(ctx context.Context, volume string, readOnly bool) error {
	done, err := b.turn(ctx, volume)
	if err != nil {
		return err
	}
	defer done()
	v, err := b.volume(ctx, volume)
	facts, data := v.facts, v.data
	switch {
	case err != nil:
		return err
	case data == nil:
		return state.Errorf(state.NotFound, "volume %s: attach: there is no such volume, or its data is gone", volume)
	}
	match, as := b.stands(volume, data), v.shape(readOnly)
	d, err := b.current(ctx, b.tag(volume), match)
	if err == nil && d != nil && b.owns(d, volume) && !d.is(as) {
		if err = b.abandon(ctx, b.tag(volume), d, as.solid); err == nil {
			d, err = b.search(ctx, b.tag(volume), match)
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("volume %s: attach: %w", volume, err)
	case d == nil && facts.Size < facts.Capacity:
		return state.Errorf(state.FailedPrecondition, "volume %s: attach: %s has %d bytes, %d fewer than the volume: it was truncated; restore it from a backup", volume, facts.Backing, facts.Size, facts.Capacity-facts.Size)
	case d == nil:
		err = b.attach(ctx, volume, match, as)
	case !b.owns(d, volume):
		return foreign(volume, d)
	case d.file() != data.id:
		return state.Errorf(state.FailedPrecondition, "volume %s: attach: %s shows another file than %s, which was replaced meanwhile: unstage the volume first", volume, d, facts.Backing)
	case d.detaching():
		err = b.reclaim(ctx, b.tag(volume), d, as.solid)
	}
	if err != nil {
		return fmt.Errorf("volume %s: attach: %w", volume, err)
	}
	return nil
}

// attach attaches the file of a volume, which must still be the one looked at.
func (b *Backend) attach(ctx context.Context, volume string, match sought, as shape) (err error) {
	backing, err := openData(match.path, match.data.id, modeOf(as.readOnly))
	if err != nil {
		return err
	}
	defer closeAfter(backing, &err)
	if as.solid {
		if err := refill(ctx, backing); err != nil {
			klog.FromContext(ctx).Error(err, "A thick volume lacks blocks; what is written there may find no room", "volume", volume)
		}
	}
	tag := b.tag(volume)
	return b.configure(ctx, receiver{volume: volume}, tag, backing, tag, as, &match, func(d *device) bool {
		return b.owns(d, volume) && d.file() == match.data.id && d.is(as)
	})
}

// openData opens a volume's file, which must still be the one looked at.
func openData(path string, id fileID, mode int) (*os.File, error) {
	f, err := os.OpenFile(path, mode|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, errors.Join(pathError("fstat", f, err), f.Close())
	}
	if id != (fileID{numberOf(st.Dev), st.Ino}) {
		return nil, errors.Join(fmt.Errorf("%s was replaced meanwhile", path), f.Close())
	}
	return f, nil
}

// modeOf returns how backings and devices are opened. A loop device that is
// configured through a descriptor that cannot write is read-only.
func modeOf(readOnly bool) int {
	if readOnly {
		return os.O_RDONLY
	}
	return os.O_RDWR
}

// configure makes a free loop device show a file, and looks whether match accepts it. When no other device may show
// the file, only says which ones would.
func (b *Backend) configure(ctx context.Context, to receiver, key string, backing *os.File, tag string, as shape, only *sought, match func(*device) bool) (err error) {
	// Size 0 is another default with direct I/O than without, since Linux 6.14.
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: uint32(as.sector)}
	copy(config.Info.File_name[:tagSize], tag)
	if as.readOnly {
		config.Info.Flags = unix.LO_FLAGS_READ_ONLY
	}
	buffered := whyBuffered(backing, as.sector)
	if buffered == "" {
		config.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer closeAfter(control, &err)

	taken := map[string]bool{} // those that others were faster to take
	for try := range attachTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		name, sure, err := b.free(ctx, control, to, try < attachTries/2, taken)
		if err != nil {
			return err
		}
		if !as.readOnly && !as.solid && discardIsOff(name) {
			switch err := renew(name); {
			case err == nil:
				continue
			case !sure: // Somebody looks at it just now: then another, which nobody had yet.
				if name, err = b.addUnspared(control, to); err != nil {
					return err
				}
			}
		}
		leased := false
		if only != nil {
			if leased, err = b.alone(ctx, key, backing, *only); err != nil {
				return err
			}
		}
		var d *device
		taken[name], err = bind(ctx, name, backing, &config, as, leased, func() (shown bool, err error) {
			b.remember(key, &device{name: name})
			if d, err = b.recall(ctx, key, sought{is: match, named: func(string) bool { return false }}); err == nil && d == nil {
				err = fmt.Errorf("%s was configured for %s and does not show it so", name, backing.Name())
			}
			if err == nil { // somebody may have bound it since it was chosen
				shown, err = b.spared(name, to)
			}
			return shown, err
		})
		switch {
		case err != nil:
			return err
		case taken[name]:
			continue
		}
		if buffered == "" && !d.direct() {
			buffered = "the kernel declined"
		}
		klog.FromContext(ctx).V(2).Info("Attached a loop device", "device", d.path(), "backing", backing.Name(), "readOnly", d.readOnly, "sectorBytes", d.sector, "directIO", d.direct(), "whyBuffered", buffered)
		return nil
	}
	return fmt.Errorf("no free loop device could be had in %d tries: other processes took each one first", attachTries)
}

// alone makes sure that no device shows an open file: by a lease, which is left
// to the caller and keeps others from opening it, or else by a look at all devices.
func (b *Backend) alone(ctx context.Context, key string, backing *os.File, only sought) (leased bool, err error) {
	if lease.Take(backing) == nil {
		return true, nil
	}
	d, err := b.search(ctx, key, only)
	if err == nil && d != nil {
		err = fmt.Errorf("%s shows the data by now", d)
	}
	return false, err
}

// bind configures one device; taken says that another process was faster, or
// wants the leased backing, too, or shows the device's number. The lease ends. After an error the device is
// free again.
func bind(ctx context.Context, name string, backing *os.File, config *unix.LoopConfig, as shape, leased bool, look func() (shown bool, err error)) (taken bool, err error) {
	if leased {
		defer func() { err = errors.Join(err, lease.Drop(backing)) }()
	}
	f, err := open(name, modeOf(as.readOnly))
	if raced(err) || errors.Is(err, os.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer closeAfter(f, &err)
	err = unix.IoctlLoopConfigure(int(f.Fd()), config)
	switch {
	case raced(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("LOOP_CONFIGURE (Linux 5.8) %s: %w", f.Name(), err)
	}
	defer func() {
		if taken || err != nil { // nobody else can have configured it meanwhile: it is open here
			err = errors.Join(err, takeBack(f))
		}
	}()
	if leased {
		if taken, err = broken(backing); taken || err != nil {
			return taken, err
		}
	}
	if !as.readOnly {
		// BLKROSET outlives the backing that it was meant for. Without CAP_SYS_ADMIN it is refused, and LOOP_CONFIGURE is not.
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0); err != nil {
			return false, pathError("BLKROSET (needs CAP_SYS_ADMIN)", f, err)
		}
	}
	if as.solid {
		turnDiscardOff(ctx, name)
	}
	return look()
}

// broken reports whether a lease did not last until now.
func broken(backing *os.File) (bool, error) {
	held, err := lease.Held(backing)
	return !held, err
}

// takeBack detaches what was configured through an open device just now. It goes
// when that is closed.
func takeBack(f *os.File) error {
	return pathError("LOOP_CLR_FD", f, unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0))
}

// raced reports whether another process has taken the device, or removes it.
func raced(err error) bool {
	return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV)
}

// reclaim keeps a device that is going away. While it is open here it cannot
// go, so what is seen then holds.
func (b *Backend) reclaim(ctx context.Context, key string, d *device, solid bool) (err error) {
	unlock, err := b.nodes.Lock(ctx, d.name)
	if err != nil {
		return err
	}
	defer unlock()
	f, err := open(d.name, os.O_RDONLY)
	if err != nil {
		return fmt.Errorf("reclaim: %w", err)
	}
	defer closeAfter(f, &err)
	now, err := describe(f, d.name)
	switch {
	case err != nil:
		return err
	case now == nil || now.tag() != d.tag() || now.file() != d.file():
		b.forget(key)
		return fmt.Errorf("%s went away before it could be reclaimed", d.path())
	}
	now.info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	if err := unix.IoctlLoopSetStatus64(int(f.Fd()), &now.info); err != nil {
		return &os.PathError{Op: "LOOP_SET_STATUS64", Path: d.path(), Err: err}
	}
	if solid { // LOOP_SET_STATUS64 turned it on again, before Linux 6.11
		turnDiscardOff(ctx, d.name)
	}
	switch now, err = describe(f, d.name); {
	case err != nil:
		return err
	case now == nil || now.detaching():
		return fmt.Errorf("%s is still going away", d.path())
	}
	return nil
}
