package loop

import (
	"context"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// A pod that has a loop device as its raw volume needs no capability to change how that is
// attached: LOOP_SET_STATUS64 sets its tag and which part of the backing it shows. The plugin
// would not know its own device any more, or take it for that of another volume. What such a
// pod cannot change, unless it detaches the device, are the backing and the sequence number.

// altered reports whether a device is attached as it was, and has another tag or shows
// another part of its backing.
func (d *Device) altered(was *Device) bool {
	return was.sequence != 0 && d.sequence == was.sequence && d.File() == was.File() && IsTag(was.Tag()) && was.showsAll() &&
		(d.Tag() != was.Tag() || !d.showsAll())
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
	defer closeAfter(f, &err)
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
	was := s.index[key].was
	s.mu.Unlock()
	if d.altered(&was) {
		return restore(ctx, d, was.Tag())
	}
	return d
}
