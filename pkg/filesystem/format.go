package filesystem

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// Format makes a file system on a blank device. It proves blankness itself,
// whatever was seen before, and reads back what mkfs made. When it fails, mkfs
// may have written: the device is then blank, or it is not, and the next probe tells.
//
// It blocks for a slot (see New), for the proof and for mkfs; when ctx ends,
// mkfs is killed, and Format returns once it is gone.
//
// FailedPrecondition: the device is not blank, is read-only, or is too small.
// InvalidArgument: the type is not of Types. A device that somebody else holds
// is an error without a class.
func (h *Host) Format(ctx context.Context, facts state.Device, fsType string) error {
	if err := h.format(ctx, facts, fsType); err != nil {
		return fmt.Errorf("format %s as %s: %w", facts.Path, fsType, err)
	}
	return nil
}

func (h *Host) format(ctx context.Context, facts state.Device, fsType string) error {
	k, err := h.kind(fsType)
	if err != nil {
		return err
	}
	if facts.ReadOnly {
		return state.Errorf(state.FailedPrecondition, "the device is read-only")
	}
	release, err := h.slot(ctx)
	if err != nil {
		return err
	}
	defer release()
	// Held open throughout, so that a loop device with autoclear stays.
	d, err := open(facts, 0)
	if err != nil {
		return err
	}
	return errors.Join(h.formatOpen(ctx, d, k), d.Close())
}

func (h *Host) formatOpen(ctx context.Context, d *device, k kind) error {
	zeroed, err := h.refuseUnlessBlank(ctx, d)
	if err != nil {
		return err
	}
	t := k.traits()
	if d.bytes < t.smallest {
		return state.Errorf(state.FailedPrecondition, "the device has %d bytes, and %s needs at least %d: use a larger volume or another file system", d.bytes, t.name, t.smallest)
	}
	if err := k.format(ctx, d, zeroed); err != nil {
		return err
	}
	if err := d.flush(); err != nil {
		return fmt.Errorf("flush after mkfs: %w", err)
	}
	_, sb, other := h.recognise(d)
	switch {
	case other != nil:
		return fmt.Errorf("mkfs reported success, and the device holds %s", other.Found)
	case sb == nil:
		return errors.New("mkfs reported success, and there is no file system on the device")
	case sb.fsType != t.name:
		return fmt.Errorf("mkfs reported success, and the device holds a file system of type %s", sb.fsType)
	case sb.bytes < d.bytes/2:
		return fmt.Errorf("mkfs reported success, and the file system has only %d of the device's %d bytes", sb.bytes, d.bytes)
	}
	return nil
}

// refuseUnlessBlank is the guard. It reports whether all of the device is known
// to be zero.
func (h *Host) refuseUnlessBlank(ctx context.Context, d *device) (zeroed bool, err error) {
	if err := claim(d.facts); err != nil {
		return false, err
	}
	var p proof
	if _, sb, other := h.recognise(d); other != nil {
		p.found = other.Found
	} else if sb != nil {
		p.found = sb.fsType + " file system"
	} else if p, err = proveBlank(ctx, d); err != nil {
		return false, err
	}
	if p.found != "" {
		return false, state.Errorf(state.FailedPrecondition, "only a blank device is formatted; found %s", p.found)
	}
	return p.whole, nil
}

// claim claims the device (O_EXCL) and lets go of it at once: an error when
// somebody has it mounted or claimed. It is not kept until mkfs claims the
// device itself, because every child that is forked meanwhile keeps it, too,
// from its fork to its exec, and mkfs would be refused.
func claim(facts state.Device) error {
	d, err := open(facts, unix.O_EXCL)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("somebody has it mounted or claimed: %w", err)
	}
	if err != nil {
		return err
	}
	return d.Close()
}
