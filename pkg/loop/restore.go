package loop

import (
	"context"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const loopChangeFD = 0x4c06 // LOOP_CHANGE_FD in the kernel's include/uapi/linux/loop.h

// A pod that has a loop device as its raw volume needs no capability to change how that is
// attached: LOOP_SET_STATUS64 sets its tag and which part of the backing it shows. The plugin
// would not know its own device any more, or take it for that of another volume. What such a
// pod cannot change, unless it detaches the device, are the backing and the sequence number.
//
// It can also detach the device (LOOP_CLR_FD), and attach the number anew over a file of its
// own with any tag (LOOP_CONFIGURE). That is not undone: such a device is left alone, and does
// not stand for the volume of the tag. What a pod cannot make it show is the file of another
// volume, and it has no device but the one that its own volume is published as.

// altered reports whether a device is attached as it was, and has another tag or shows
// another part of its backing.
func (d *Device) altered(was *Device) bool {
	return was.sequence != 0 && d.sequence == was.sequence && d.File() == was.File() && isTag(was.Tag()) && was.showsAll() &&
		(d.Tag() != was.Tag() || !d.showsAll())
}

// forged reports whether a device has the tag of a target, and is not the target's: it shows
// another file, and its number is published for another volume, or for none while its backing
// does not look like an earlier file of the target, nor was the device seen to show that file
// before (LOOP_CHANGE_FD).
func (s *Devices) forged(ctx context.Context, t Target, d *Device) bool {
	if t.isView() || d.Tag() != t.Tag || t.File != nil && d.File() == t.File.ID {
		return false
	}
	if owner := s.owner(d.number); owner != "" && t.isFor(owner) || owner == "" && (t.File == nil || t.mayBeAt(backingOf(d.name)) || s.showed(t, d)) {
		return false
	}
	logForged(ctx, d)
	return true
}

// showed reports whether the index saw a device, read-only as it is, show the file of a target.
func (s *Devices) showed(t Target, d *Device) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	was := s.index[t.key()].was
	return was.name == d.name && was.File() == t.File.ID && d.swappedSince(&was)
}

func logForged(ctx context.Context, d *Device) {
	klog.FromContext(ctx).Info("A loop device has the tag of a volume and does not show it, so it is left alone: a pod that has a device raw can attach it anew like that", "device", d.name, "tag", d.Tag(), "backing", d.Backing())
}

// restore gives an altered device its tag, and lets it show all of its backing. The caller
// has the device's turn. What cannot be restored is logged, and returned as it is.
func restore(ctx context.Context, d *Device, tag string) *Device {
	restored, err := restoreStatus(d, tag)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Somebody has changed how a loop device is attached, and that cannot be undone", "device", d.name, "tag", d.Tag(), "shouldBe", tag)
		return d
	}
	klog.FromContext(ctx).Info("Somebody had changed how a loop device is attached: a pod that has it raw can", "device", d.name, "tag", d.Tag(), "offset", d.info.Offset, "sizeLimit", d.info.Sizelimit, "restored", tag)
	return restored
}

func restoreStatus(d *Device, tag string) (restored *Device, err error) {
	f, err := open(d.name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer rawfile.CloseAfter(f, &err)
	now, err := identify(int(f.Fd()), d.name)
	switch {
	case err != nil:
		return nil, err
	case now == nil || !d.still(int(f.Fd())):
		return nil, fmt.Errorf("%s was detached meanwhile", d.Path())
	}
	now.info.Offset, now.info.Sizelimit, now.info.File_name = 0, 0, [64]uint8{}
	copy(now.info.File_name[:tagSize], tag)
	if err := unix.IoctlLoopSetStatus64(int(f.Fd()), &now.info); err != nil {
		return nil, &os.PathError{Op: "LOOP_SET_STATUS64", Path: d.Path(), Err: err}
	}
	return describe(int(f.Fd()), d.name)
}

// restored returns a device of the index as it is after an alteration was undone, if there
// was one. The caller has the device's turn.
func (s *Devices) restored(ctx context.Context, key string, d *Device) *Device {
	s.mu.Lock()
	was, backing := s.index[key].was, s.index[key].backing
	s.mu.Unlock()
	switch {
	case was.name != d.name:
	case d.altered(&was):
		return restore(ctx, d, was.Tag())
	case was.isView():
		if s.swapped(ctx, d, was.over()) {
			return restoreView(ctx, d, was.over())
		}
	case d.swappedFile(&was, backing):
		return restoreSwapped(ctx, d, func() (*os.File, error) { return OpenFile(backing, was.File(), os.O_RDONLY) })
	}
	return d
}

// swapped reports whether a device was a view of another one, and somebody has put something
// else behind it: a pod that has it for reading can (LOOP_CHANGE_FD), which leaves the tag.
// The device may be the view of another one by now, or have been, perhaps another plugin's.
func (s *Devices) swapped(ctx context.Context, d *Device, over state.DeviceNumber) bool {
	if d.Tag() != viewTag || !d.readOnly || d.over() == over {
		return false
	}
	return s.shownAsView(ctx, s.owner(d.number), d.number)
}

// shownAsView reports whether the view of a volume has a number for sure: nobody gets one
// that the volume is published with and that is bound there.
func (s *Devices) shownAsView(ctx context.Context, volume string, number state.DeviceNumber) bool {
	n := s.numbers
	return volume != "" && n.Published != nil && n.Shown != nil && slices.Contains(n.Published(volume, true), number) && n.Shown(ctx, volume, number)
}

// restorePublished returns the view that a volume is published as, if somebody has put
// something else behind it while no index knew it; nil if not.
func (s *Devices) restorePublished(ctx context.Context, r Request) (*Device, error) {
	for _, number := range s.published(r) {
		index, err := indexOf(number)
		if err != nil {
			return nil, err
		}
		if s.owner(number) != r.Volume || !s.shownAsView(ctx, r.Volume, number) {
			continue
		}
		d, err := s.restoreOver(ctx, nameOf(index), r.over)
		if d != nil || err != nil {
			return d, err
		}
	}
	return nil, nil
}

func (s *Devices) restoreOver(ctx context.Context, name string, over state.DeviceNumber) (*Device, error) {
	done, err := s.Turn(ctx, name)
	if err != nil {
		return nil, err
	}
	defer done()
	d, err := ask(name)
	if d == nil || err != nil || !s.swapped(ctx, d, over) {
		return nil, err
	}
	if d = restoreView(ctx, d, over); d.over() != over {
		return nil, nil
	}
	s.remember(ViewOf(over).key(), d)
	return d, nil
}

// swappedSince is swapped for a read-only device over a file.
func (d *Device) swappedSince(was *Device) bool {
	return d.readOnly && !d.isView() && d.Tag() == was.Tag() && d.File() != was.File()
}

// swappedFile is swappedSince while the file that was shown is at its path still.
func (d *Device) swappedFile(was *Device, path string) bool {
	if !d.swappedSince(was) {
		return false
	}
	file, err := StatFile(path)
	return err == nil && file != nil && file.ID == was.File()
}

// restoreView lets a view show all of the device again that it showed. The caller has its turn.
func restoreView(ctx context.Context, d *Device, over state.DeviceNumber) *Device {
	d = restoreSwapped(ctx, d, func() (*os.File, error) {
		path, err := devnode.PathOf(over)
		if err != nil {
			return nil, err
		}
		return devnode.Open(path, over, os.O_RDONLY)
	})
	if d.over() == over && !d.showsAll() {
		return restore(ctx, d, viewTag)
	}
	return d
}

// restoreSwapped puts the backing that is opened behind a read-only device again.
func restoreSwapped(ctx context.Context, d *Device, open func() (*os.File, error)) *Device {
	swapped := d.Backing()
	restored, err := changeBack(d, open)
	if err != nil {
		klog.FromContext(ctx).Error(err, "Somebody has put something else behind a read-only device, and that cannot be undone", "device", d.name, "backing", swapped)
		return d
	}
	klog.FromContext(ctx).Info("Somebody had put something else behind a read-only device: a pod that has it raw can", "device", d.name, "backing", swapped, "restored", restored.Backing())
	return restored
}

func changeBack(d *Device, openBacking func() (*os.File, error)) (restored *Device, err error) {
	backing, err := openBacking()
	if err != nil {
		return nil, err
	}
	defer rawfile.CloseAfter(backing, &err)
	f, err := open(d.name, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer rawfile.CloseAfter(f, &err)
	if !d.still(int(f.Fd())) {
		return nil, fmt.Errorf("%s was attached anew meanwhile", d.Path())
	}
	if err := unix.IoctlSetInt(int(f.Fd()), loopChangeFD, int(backing.Fd())); err != nil {
		return nil, rawfile.PathError("LOOP_CHANGE_FD", f, err)
	}
	return describe(int(f.Fd()), d.name)
}
