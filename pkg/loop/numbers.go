package loop

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Numbers tells which device numbers are in use. A device node that is bound at a path, or
// was made in a pod, is only a number: it would show whatever volume gets that number next.
// The functions are called concurrently; a nil one means that no number is in use.
type Numbers struct {
	// Owner returns the volume that is published with the number, "" for none.
	Owner func(state.DeviceNumber) (volume string)
	// Bound reports whether a device node with the number is bound anywhere on
	// this node, by whomever.
	Bound func(state.DeviceNumber) (bool, error)
	// Published returns the numbers with which a volume is published: those of its
	// device, or those that its read-only view may have.
	Published func(volume string, view bool) []state.DeviceNumber
	// Shown reports whether a device node with the number is bound where the volume is
	// published with it. nil: none is.
	Shown func(ctx context.Context, volume string, number state.DeviceNumber) bool
}

// Reserve sets which numbers are in use. Such a number is given only to the volume that is
// published with it; that volume gets it again if possible. Reserve must be called before
// anything is attached.
func (s *Devices) Reserve(numbers Numbers) { s.numbers = numbers }

// owner returns the volume that is published with a number, "" for none.
func (s *Devices) owner(number state.DeviceNumber) (volume string) {
	if s.numbers.Owner == nil {
		return ""
	}
	return s.numbers.Owner(number)
}

// reserved reports whether the number of a free device is kept for somebody else.
func (s *Devices) reserved(name string, r Request) (bool, error) {
	number, err := numberOf(name)
	if err != nil {
		return false, err
	}
	return s.reservedNumber(number, r)
}

func (s *Devices) reservedNumber(number state.DeviceNumber, r Request) (bool, error) {
	switch owner := s.owner(number); {
	case owner != "":
		return owner != r.Volume, nil
	case s.numbers.Bound == nil:
		return false, nil
	}
	return s.numbers.Bound(number)
}

// free returns the name of a free device; another process may still take it. With again,
// it first tries the device that the volume is published as. sure: it is that device, and
// no other one will do. A device in taken is not offered again: it may look free while
// somebody has it claimed.
func (s *Devices) free(ctx context.Context, control *os.File, r Request, again bool, taken map[string]bool) (name string, sure bool, err error) {
	if again {
		if name, err = s.publishedDevice(control, r); name != "" || err != nil {
			return name, true, err
		}
	}
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		return "", false, fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
	}
	name = nameOf(n)
	switch reserved, err := s.reserved(name, r); {
	case err == nil && !reserved && !taken[name]:
		return name, false, nil
	case err != nil && !errors.Is(err, os.ErrNotExist): // it may have been removed just now
		return "", false, err
	case err == nil && reserved:
		klog.FromContext(ctx).V(2).Info("The number of a free loop device is shown to somebody, and left alone", "device", name)
	}
	for n++; ; n++ { // the kernel names the lowest one only
		if err := ctx.Err(); err != nil {
			return "", false, err
		}
		name := nameOf(n)
		if taken[name] || !isFree(name) {
			continue
		}
		switch reserved, err := s.reserved(name, r); {
		case err == nil && !reserved:
			return name, false, nil
		case errors.Is(err, os.ErrNotExist): // nor is there likely to be any above
			name, err = s.addUnreserved(control, r)
			return name, false, err
		case err != nil:
			return "", false, err
		}
	}
}

// published returns the numbers of loop devices that a volume, or its view, is published with.
func (s *Devices) published(r Request) []state.DeviceNumber {
	if s.numbers.Published == nil || r.Volume == "" {
		return nil
	}
	all := s.numbers.Published(r.Volume, r.isView())
	return slices.DeleteFunc(all, func(n state.DeviceNumber) bool { return n.Major != loopMajor })
}

// publishedDevice returns the device that a volume, or its view, is published as, if it is
// free; "" if there is none.
func (s *Devices) publishedDevice(control *os.File, r Request) (name string, err error) {
	for _, number := range s.published(r) {
		index, err := indexOf(number)
		if err != nil {
			return "", err
		}
		name := nameOf(index)
		if !isFree(name) {
			continue
		}
		// Somebody may have removed it (LOOP_CTL_REMOVE).
		if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, index); err != nil && !errors.Is(err, unix.EEXIST) {
			return "", fmt.Errorf("LOOP_CTL_ADD %d: %w", index, err)
		}
		if now, err := numberOf(name); err == nil && now == number {
			return name, nil
		}
	}
	return "", nil
}

// indexOf returns the index of the loop device with a number: each has minors
// for as many partitions as max_part says, rounded up to a power of two.
func indexOf(number state.DeviceNumber) (int, error) {
	raw, err := rawfile.Read(maxPartPath)
	if errors.Is(err, os.ErrNotExist) {
		return int(number.Minor), nil
	}
	if err != nil {
		return 0, err
	}
	parts, err := strconv.ParseUint(strings.TrimSpace(string(raw)), 10, 32)
	if err != nil {
		return 0, fmt.Errorf("loop.max_part: %w", err)
	}
	return int(number.Minor >> bits.Len64(parts)), nil
}

// addUnreserved makes devices until one's number is not kept for somebody else:
// the kernel gives the lowest that has no device, be its number shown or not.
func (s *Devices) addUnreserved(control *os.File, r Request) (name string, err error) {
	for range attachTries {
		n, err := add(control)
		if err != nil {
			return "", err
		}
		switch reserved, err := s.reserved(nameOf(n), r); {
		case errors.Is(err, os.ErrNotExist): // somebody has removed it
		case err != nil || !reserved:
			return nameOf(n), err
		}
	}
	return "", fmt.Errorf("LOOP_CTL_ADD: %d numbers in a row are shown to others, or were removed at once", attachTries)
}

// nameOf returns the name of the device with an index, which is its number too
// only where loop devices have no partitions.
func nameOf(index int) string { return fmt.Sprintf("loop%d", index) }
