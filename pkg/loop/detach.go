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
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// goneLimit is how long a detach waits for others who have the device
	// open, or claim it: udev and blkid open every device for a moment, which is longer
	// on a node that is short of CPUs. The kernel wakes nobody when the device goes, so
	// it is looked at every goneInterval.
	goneLimit    = time.Second
	goneInterval = 5 * time.Millisecond
)

// errHeld is in the errors of a detach that was refused or is not complete.
var errHeld = errors.New("still in use")

// Detach detaches the plugin's device for a target and returns nil when it is seen
// to be gone. It leaves a device alone that is mounted or claimed, or that another
// device is stacked on. A device that is merely open goes when the last one
// closes it; the error names who has it open until then. Foreign devices are
// left alone. The tag says which one is the plugin's. The file, if it is known, is
// asked for no more than the proof that no other device shows it, as one does that
// was attached twice; without that proof all devices are looked at.
func (s *Devices) Detach(ctx context.Context, t Target) error {
	tagged := t
	tagged.File = nil
	for {
		d, err := s.Recall(ctx, tagged)
		if d == nil && err == nil && !t.nobodyHasItOpen() {
			d, err = s.search(ctx, tagged)
		}
		if d == nil || err != nil {
			return err
		}
		unused, err := s.release(ctx, d, t)
		if err != nil {
			return err
		}
		if s.forgetAs(t.key(), d.name); unused {
			return nil
		}
	}
}

// detachToReattach detaches a device to attach it in another shape. It is kept if it
// does not go at once.
func (s *Devices) detachToReattach(ctx context.Context, r Request, d *Device) error {
	_, err := s.release(ctx, d, r.Target)
	if err == nil {
		s.forget(r.key())
		return nil
	}
	if !d.Detaching() {
		if now, asked := ask(d.name); asked != nil {
			err = errors.Join(err, asked)
		} else if now.same(d) && now.Detaching() {
			err = errors.Join(err, s.reclaim(ctx, r.key(), now, r.Solid))
		}
	}
	if errors.Is(err, errHeld) {
		return state.Errorf(state.FailedPrecondition, "it is attached otherwise (read-only %t, sectors of %d bytes): %w", d.readOnly, d.sector, err)
	}
	return err
}

// release clears a device of a target and sees that it is gone. unused: that was seen by
// the file, which no other device shows either.
func (s *Devices) release(ctx context.Context, d *Device, t Target) (unused bool, err error) {
	unlock, err := s.nodes.Lock(ctx, d.name)
	if err != nil {
		return false, err
	}
	defer unlock()
	if now, err := askFor(d.name, identify); err == nil && now != nil && !now.same(d) {
		return false, nil // it belongs to somebody else now, whom a claim would disturb
	}
	gone, err := s.clear(ctx, d)
	switch {
	case err != nil || gone:
		return false, err
	case t.File != nil && d.File() == t.File.ID && t.nobodyHasItOpen():
		return true, nil
	}
	return false, s.awaitGone(ctx, d)
}

// clear tells the kernel to let go of the backing, unless the device is in use. Once it is
// open with O_EXCL, nobody can mount it. LOOP_CLR_FD detaches when the last one closes the
// device, which is this function if all is well.
func (s *Devices) clear(ctx context.Context, d *Device) (gone bool, err error) {
	f, err := claim(ctx, d, os.O_RDONLY)
	switch {
	case errors.Is(err, unix.EBUSY):
		if err := heldBy(d, stackedOn(d)); err != nil {
			return false, err
		}
		return false, fmt.Errorf("%s is %w: it is mounted or claimed, perhaps in another mount namespace", d, errHeld)
	case errors.Is(err, unix.ENXIO): // it is being cleared
		return false, nil
	case err != nil:
		return false, err
	}
	defer rawfile.CloseAfter(f, &err)
	now, err := identify(int(f.Fd()), d.name)
	if err != nil && d.still(int(f.Fd())) {
		now, err = d, nil
	}
	switch {
	case err != nil:
		return false, err
	case !now.same(d):
		return true, nil
	}
	switch view, err := s.Recall(ctx, ViewOf(d.number)); { // which does not claim it
	case err != nil:
		return false, err
	case view != nil:
		return false, heldBy(d, []string{view.String()})
	}
	// Before Linux 6.11 the ioctl drops the pages that somebody has written and closed since the
	// claim. An error must not keep a dead disk attached.
	if err := rawfile.WriteBack(f); err != nil {
		klog.FromContext(ctx).Error(err, "Not all that was written to a loop device could be written back", "device", d.name)
	}
	if err := unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0); err != nil && !errors.Is(err, unix.ENXIO) {
		return false, &os.PathError{Op: "LOOP_CLR_FD", Path: d.Path(), Err: err}
	}
	return false, nil
}

// claim opens a device O_EXCL. Somebody else's claim may end in a moment, such as that of a
// program that used an earlier device of this number: it is waited for.
func claim(ctx context.Context, d *Device, mode int) (f *os.File, err error) {
	if !poll.Until(ctx, goneInterval, goneLimit, func() bool {
		f, err = devnode.Open(d.Path(), d.number, mode|unix.O_EXCL)
		return !errors.Is(err, unix.EBUSY)
	}) && ctx.Err() != nil {
		err = fmt.Errorf("%w; %w", err, ctx.Err())
	}
	return f, err
}

// awaitGone waits a moment for a cleared device to be gone. One that others have
// open may be one that another loop device shows: then it is kept.
func (s *Devices) awaitGone(ctx context.Context, d *Device) (err error) {
	looks := 0
	done := poll.Until(ctx, goneInterval, goneLimit, func() bool {
		if isFree(d.name) {
			return true
		}
		var now *Device
		if now, err = ask(d.name); err != nil || now != nil && !now.same(d) {
			return true
		}
		if looks++; looks == 2 { // it is not open for a moment only
			err = s.checkNotShown(ctx, d)
		}
		return err != nil
	})
	switch {
	case done:
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("%s is %w: %w", d, errHeld, ctx.Err())
	}
	return fmt.Errorf("%s is %w, and goes when it is closed by %s", d, errHeld, process.Openers(ctx, d.number))
}

// stackedOn names what sysfs lists as holders of a device (device-mapper, md, bcache): they
// claim it.
func stackedOn(d *Device) (holders []string) {
	entries, _ := os.ReadDir(filepath.Join(sysBlock, d.name, "holders")) // it may be gone
	for _, e := range entries {
		holders = append(holders, "/dev/"+e.Name())
	}
	return holders
}

// checkNotShown returns an error that names other loop devices over d, which was
// cleared and goes with the last of them, and keeps d then, unless it was on its way
// out before. It asks all devices that the index does not know, as neither sysfs nor
// the name of a backing tells it.
func (s *Devices) checkNotShown(ctx context.Context, d *Device) error {
	all, silent, err := s.scan(ctx, nil)
	if err != nil {
		return err
	}
	users := ViewOf(d.number).candidates(silent)
	for _, other := range all {
		if other.over() == d.number {
			users = append(users, other.String())
		}
	}
	if len(users) == 0 || d.Detaching() {
		return heldBy(d, users)
	}
	switch gone, err := cancelDetach(ctx, d, discardDisabled(d.name)); {
	case gone, isFree(d.name):
		return nil
	case err != nil:
		return err
	}
	return heldBy(d, users)
}

func heldBy(d *Device, users []string) error {
	if len(users) == 0 {
		return nil
	}
	return fmt.Errorf("%s is %w by %s", d, errHeld, strings.Join(users, ", "))
}
