package loop

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/lease"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// attachTries bounds the race for a free device with other processes.
const attachTries = 256

// Shape is how a device shows its backing.
type Shape struct {
	ReadOnly bool
	Sector   int  // the logical sector size, in bytes
	Solid    bool // writable, and a discard must not free blocks of the backing
}

// Request is what Attach is asked for.
type Request struct {
	Target
	Shape
	// Volume is the volume that the device is for, as in Numbers; empty: that is not known.
	Volume string
	// Open opens the file to show, for writing unless the Shape is read-only. It is called
	// only if no device shows the file yet, and must make sure that it is the Target's.
	Open func() (*os.File, error)
}

// Attach attaches a device for the request's target, or reclaims one that is being
// detached. A device of another shape that nobody uses is attached anew.
//
// FailedPrecondition: something else shows the file, the target's device shows another
// file, or it is held in another shape. Unavailable: somebody has the file open, and that
// may be a loop device that does not answer.
func (s *Devices) Attach(ctx context.Context, r Request) error {
	d, err := s.Recall(ctx, r.Target)
	if d == nil && err == nil && r.isView() {
		d, err = s.restorePublished(ctx, r)
	}
	unused := d == nil && err == nil && r.nobodyHasItOpen()
	if d == nil && err == nil && !unused {
		d, err = s.search(ctx, r.Target)
	}
	if err == nil && d != nil && r.Owns(d) && !d.is(r.Shape) {
		if err = s.detachToReattach(ctx, r, d); err == nil {
			d, err = s.search(ctx, r.Target)
		}
	}
	switch {
	case err != nil:
		return err
	case d == nil:
		return s.attach(ctx, r, unused)
	case !r.Owns(d):
		return Foreign(d)
	case r.File != nil && d.File() != r.File.ID:
		return state.Errorf(state.FailedPrecondition, "%s shows another file than %s, which was replaced meanwhile: unstage the volume first", d, r.Path)
	case d.Detaching():
		return s.reclaim(ctx, r.key(), d, r.Solid)
	}
	return nil
}

// Foreign returns FailedPrecondition, with what to do about a device over a
// volume's data that the plugin did not attach.
func Foreign(d *Device) error {
	return state.Errorf(state.FailedPrecondition, "its data is in use by %s, which the plugin did not attach: detach it (losetup -d %s)", d, d.Path())
}

func (s *Devices) attach(ctx context.Context, r Request, unused bool) (err error) {
	backing, err := r.Open()
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(backing, &err)
	return s.configure(ctx, r, backing, unused)
}

// modeOf returns how backings and devices are opened. A loop device that is
// configured through a descriptor that cannot write is read-only.
func modeOf(readOnly bool) int {
	if readOnly {
		return os.O_RDONLY
	}
	return os.O_RDWR
}

// configure makes a free loop device show an open file or device, and checks that it does.
// unused says that a lease has just proved that nobody else has the file open.
func (s *Devices) configure(ctx context.Context, r Request, backing *os.File, unused bool) (err error) {
	buffered := bufferedReason(backing, r.Sector)
	config := r.config(backing, buffered == "")
	control, err := rawfile.Open(controlPath, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(control, &err)

	taken := map[string]bool{} // devices that another process took first
	for try := range attachTries {
		if err := ctx.Err(); err != nil {
			return err
		}
		name, discards, err := s.choose(ctx, control, r, try < attachTries/2, taken)
		switch {
		case err != nil:
			return err
		case name == "":
			continue
		}
		alone := unused && try == 0
		if r.File != nil && !alone {
			if alone, err = s.proveUnused(ctx, r.Target, backing); err != nil {
				return err
			}
		}
		var d *Device
		taken[name], err = s.bind(ctx, name, backing, &config, r.Shape, alone, func(f *os.File) (taken bool, err error) {
			d, taken, err = s.check(r, f, name, backing, discards)
			return taken, err
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
		klog.FromContext(ctx).V(3).Info("Attached a loop device", "device", d.Path(), "backing", backing.Name(), "readOnly", d.readOnly, "sectorBytes", d.sector, "directIO", d.direct(), "whyBuffered", buffered)
		return nil
	}
	return fmt.Errorf("no free loop device could be had in %d tries: other processes took each one first", attachTries)
}

// config is what the kernel is told of a device that is to show a backing.
func (r Request) config(backing *os.File, direct bool) unix.LoopConfig {
	// Size 0 is another default with direct I/O than without, since Linux 6.14.
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: uint32(r.Sector)}
	copy(config.Info.File_name[:tagSize], r.Tag)
	if r.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if direct {
		config.Info.Flags |= unix.LO_FLAGS_DIRECT_IO
	}
	return config
}

// choose returns a free device, and whether it is to pass discards on, as one that is written
// to and not Solid is. One that refuses them is made anew, which may change what is free: then
// the name is empty. again and taken are as in free.
func (s *Devices) choose(ctx context.Context, control *os.File, r Request, again bool, taken map[string]bool) (name string, discards bool, err error) {
	name, sure, err := s.free(ctx, control, r, again, taken)
	discards = !r.ReadOnly && !r.Solid
	if err != nil || !discards || s.passedDiscards(name) || !discardDisabled(name) {
		return name, discards, err
	}
	switch err := recreate(name); {
	case err == nil:
		return "", false, nil
	case sure:
		return name, false, nil // a pod has its number
	}
	// Somebody looks at it just now.
	name, err = s.addUnreserved(control, r) // which nobody had before
	return name, discards, err
}

// check looks at a device that was just configured, and remembers it. taken: somebody shows its
// number since it was chosen, or had it with other limits, so that another one is to be used.
func (s *Devices) check(r Request, f *os.File, name string, backing *os.File, discards bool) (d *Device, taken bool, err error) {
	d, err = describe(int(f.Fd()), name)
	switch {
	case err != nil:
		return nil, false, err
	case d == nil, !r.shown(d):
		return nil, false, fmt.Errorf("%s was configured for %s and does not show it so", name, backing.Name())
	}
	s.rememberOver(r.key(), d, backing.Name())
	bound, err := s.reservedNumber(d.number, r)
	refuses := discards && discardDisabled(name) // it was a solid one
	s.notePassesDiscards(name, discards && !refuses)
	if taken = bound || refuses; taken || err != nil {
		s.forgetAs(r.key(), name)
	}
	return d, taken, err
}

// shown reports whether a device shows what the request asks for, in its shape.
func (r Request) shown(d *Device) bool {
	return r.Owns(d) && d.is(r.Shape) && (r.File == nil || d.File() == r.File.ID)
}

// proveUnused makes sure that no device shows an open file: either nobody else has the
// file open (alone), or all devices were asked.
func (s *Devices) proveUnused(ctx context.Context, t Target, backing *os.File) (alone bool, err error) {
	if alone, err := lease.Alone(backing); alone && err == nil {
		return true, nil
	}
	d, err := s.search(ctx, t)
	if err == nil && d != nil {
		err = fmt.Errorf("%s shows the data by now", d)
	}
	return false, err
}

// bind configures one device. taken: the device cannot be used, because another process
// took it first, has opened the backing that nobody else had open, shows the device's
// number, or used the device meanwhile. After an error the device is free again.
func (s *Devices) bind(ctx context.Context, name string, backing *os.File, config *unix.LoopConfig, as Shape, alone bool, check func(*os.File) (taken bool, err error)) (taken bool, err error) {
	f, err := s.configureFree(ctx, name, config, as.ReadOnly)
	if lostRace(err) || errors.Is(err, os.ErrNotExist) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	defer rawfile.CloseAfter(f, &err)
	defer func() {
		if taken || err != nil { // nobody else can have configured it meanwhile: it is open here
			err = errors.Join(err, undoConfigure(f))
		}
	}()
	if alone {
		if still, err := lease.Alone(backing); !still || err != nil {
			return err == nil, err
		}
	}
	if !as.ReadOnly {
		// BLKROSET outlives the backing that it was meant for. Without CAP_SYS_ADMIN it is refused, and LOOP_CONFIGURE is not.
		if err := unix.IoctlSetPointerInt(int(f.Fd()), unix.BLKROSET, 0); err != nil {
			return false, rawfile.PathError("BLKROSET (needs CAP_SYS_ADMIN)", f, err)
		}
	}
	if as.Solid {
		disableDiscard(ctx, name)
	}
	return check(f)
}

// configureFree configures a device, if it is free, and returns it open. LOOP_CONFIGURE
// claims an attached device for a moment before it refuses, and a mkfs that starts just then
// would take it for in use. So sysfs is asked first; the device has its turn, so that no other
// goroutine configures it after that, or takes the volume of that device for held.
//
// EBUSY: the device is not free.
func (s *Devices) configureFree(ctx context.Context, name string, config *unix.LoopConfig, readOnly bool) (*os.File, error) {
	done, err := s.Turn(ctx, name)
	if err != nil {
		return nil, err
	}
	defer done()
	if !isFree(name) {
		return nil, &os.PathError{Op: "attach", Path: "/dev/" + name, Err: unix.EBUSY}
	}
	f, err := open(name, modeOf(readOnly))
	if err != nil {
		return nil, err
	}
	if err := unix.IoctlLoopConfigure(int(f.Fd()), config); err != nil {
		return nil, errors.Join(fmt.Errorf("LOOP_CONFIGURE (Linux 5.8) %s: %w", f.Name(), err), f.Close())
	}
	return f, nil
}

// undoConfigure detaches an open device that was configured just now. The backing is let
// go when f is closed.
func undoConfigure(f *os.File) error {
	return rawfile.PathError("LOOP_CLR_FD", f, unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0))
}

// lostRace reports whether another process has taken the device, or removes it.
func lostRace(err error) bool {
	return errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV)
}

// reclaim cancels the detach of a device.
func (s *Devices) reclaim(ctx context.Context, key string, d *Device, solid bool) error {
	unlock, err := s.nodes.Lock(ctx, d.name)
	if err != nil {
		return err
	}
	defer unlock()
	gone, err := cancelDetach(ctx, d, solid)
	if gone {
		s.forget(key)
		return fmt.Errorf("%s went away before it could be reclaimed", d.Path())
	}
	return err
}

// cancelDetach is reclaim for a caller that has the device's turn. While the device is open
// here its detach cannot complete, so what is seen then stays true.
func cancelDetach(ctx context.Context, d *Device, solid bool) (gone bool, err error) {
	f, err := open(d.name, os.O_RDONLY)
	if err != nil {
		return false, fmt.Errorf("reclaim: %w", err)
	}
	defer rawfile.CloseAfter(f, &err)
	now, err := identify(int(f.Fd()), d.name)
	switch {
	case err != nil:
		return false, err
	case !now.same(d):
		return true, nil
	}
	now.info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	if err := unix.IoctlLoopSetStatus64(int(f.Fd()), &now.info); err != nil {
		return false, &os.PathError{Op: "LOOP_SET_STATUS64", Path: d.Path(), Err: err}
	}
	if solid { // LOOP_SET_STATUS64 turned it on again, before Linux 6.11
		disableDiscard(ctx, d.name)
	}
	switch now, err = identify(int(f.Fd()), d.name); {
	case err != nil:
		return false, err
	case now == nil || now.Detaching():
		return false, fmt.Errorf("%s is still going away", d.Path())
	}
	return false, nil
}
