package filesystem

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"regexp"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// Prove returns nil if the device is blank: if everything on it that may be data
// was read and is zero, or the device is Fresh. What is no local file is read twice,
// because a disk behind a fault may read as zeros for a while. It writes nothing, but for
// zeros over the stamp of an earlier trial (Device.Trial), blocks as long as the reading
// takes, and tells ctx how far it is (state.Progress).
//
// FailedPrecondition: the device is not blank, or there is more than ProveLimit
// to read, and it was not cleared (Device.WasCleared). Unavailable: it cannot be read. A
// device that somebody else holds is an error without a class.
func (h *Host) Prove(ctx context.Context, facts state.Device) (err error) {
	defer state.Wrap(&err, "prove %s blank", facts.Path)
	if err := unstamp(ctx, facts); err != nil {
		return err
	}
	d, err := open(facts, 0)
	if err != nil {
		return err
	}
	return errors.Join(h.prove(ctx, d), d.Close())
}

func (h *Host) prove(ctx context.Context, d *device) error {
	limit := int64(ProveLimit)
	if d.facts.WasCleared {
		limit = math.MaxInt64
	}
	err := h.refuseUnlessBlank(ctx, d, limit)
	if local, _ := d.openBacking(); local != nil {
		return errors.Join(err, local.Close())
	}
	if err != nil {
		return err
	}
	return h.refuseUnlessBlank(ctx, d, limit)
}

// Format makes a file system on a blank device. It proves blankness itself,
// whatever was seen before and however much there is to read, and reads back what mkfs made.
// A device of noise (Device.Noise) that is not Fresh is formatted without a proof, which the
// caller has by other means. When it fails, mkfs may have written: the device is then
// blank, or it is not, and the next probe tells. state.Unwritten: the device was not blank,
// keeps nothing of what mkfs wrote, or was claimed by somebody.
//
// last, if it is not nil, is called when the device was proved blank, right before mkfs. It
// returns the UUID of the file system to make, which is as mkfs wants it if it is "" or the
// type is btrfs. Its error is that of Format.
//
// It blocks for a slot (see New), for the proof and for mkfs; when ctx ends,
// mkfs is killed, and Format returns once it is gone.
//
// FailedPrecondition: the device is not blank, is read-only, or is too small.
// InvalidArgument: the type is not of Types. A device that somebody else holds
// is an error without a class, and EBUSY.
func (h *Host) Format(ctx context.Context, facts state.Device, fsType string, last func(context.Context) (uuid string, err error)) (err error) {
	defer state.Wrap(&err, "format %s as %s", facts.Path, fsType)
	return h.with(ctx, facts, fsType, func(d *device, k kind) error { return h.formatOpen(ctx, d, k, last) })
}

func (h *Host) formatOpen(ctx context.Context, d *device, k kind, last func(context.Context) (string, error)) error {
	t := k.traits()
	if d.bytes < t.smallest {
		return state.Errorf(state.FailedPrecondition, "the device has %d bytes, and %s needs at least %d: use a larger volume or another file system", d.bytes, t.name, t.smallest)
	}
	switch err := h.prepare(ctx, d); {
	case state.ClassOf(err) == state.FailedPrecondition, errors.Is(err, errUnreadable):
		return &state.Unwritten{Err: err}
	case err != nil:
		return err
	}
	uuid := ""
	if last != nil {
		var err error
		if uuid, err = last(ctx); err != nil {
			return err
		}
	}
	if t.anyUUID {
		uuid = ""
	}
	if err := k.format(ctx, d, uuid, !d.facts.Noise || d.facts.Fresh); err != nil {
		return h.noteClaimed(d, err)
	}
	if err := d.flush(); err != nil {
		return fmt.Errorf("flush after mkfs: %w", err)
	}
	_, sb, other := h.recognise(d)
	switch {
	case other != nil:
		return fmt.Errorf("mkfs reported success, and the device holds %s", other.Found)
	case sb == nil:
		return &state.Unwritten{Err: errors.New("mkfs reported success, and there is no file system on the device")}
	case sb.fsType != t.name:
		return fmt.Errorf("mkfs reported success, and the device holds a file system of type %s", sb.fsType)
	case uuid != "" && sb.uuid.String() != uuid:
		return &state.Unwritten{Err: fmt.Errorf("mkfs reported success, and the device holds another file system, %s", sb.uuid)}
	case sb.bytes < d.bytes/2:
		return fmt.Errorf("mkfs reported success, and the file system has only %d of the device's %d bytes", sb.bytes, d.bytes)
	}
	return nil
}

// refusedClaim is what mkfs.ext4, which claims the device twice, or mkfs.xfs and mkfs.btrfs say
// if somebody else has claimed it. None of them has written anything then.
var refusedClaim = regexp.MustCompile(`is apparently in use by the system|Device or resource busy while setting up superblock|open \S+: Device or resource busy`)

// noteClaimed makes EBUSY of the error of a mkfs that was refused its claim of the device. If
// anything is recognised there, it may be the mkfs that has left it: mkfs.btrfs opens the device
// again later.
func (h *Host) noteClaimed(d *device, err error) error {
	if !refusedClaim.MatchString(err.Error()) {
		return err
	}
	if _, sb, other := h.recognise(d); sb != nil || other != nil {
		return err
	}
	return &state.Unwritten{Err: fmt.Errorf("%w (%w)", err, unix.EBUSY)}
}

// prepare proves that a device is blank. One that is noise cannot be: the caller knows
// that nobody's data is on it. The places where programs look for signatures are zeroed, in
// case the noise, or an interrupted mkfs, left something there that looks like one.
func (h *Host) prepare(ctx context.Context, d *device) error {
	if !d.facts.Noise || d.facts.Fresh {
		return h.refuseUnlessBlank(ctx, d, math.MaxInt64)
	}
	if err := claim(ctx, d); err != nil {
		return err
	}
	f, err := d.again(os.O_RDWR)
	if err != nil {
		return err
	}
	zeros := make([]byte, min(signsBytes, d.bytes))
	for _, at := range []int64{0, d.bytes - int64(len(zeros))} {
		if _, err := f.WriteAt(zeros, at); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return errors.Join(f.Sync(), f.Close())
}

// signsBytes is how much of each end of a device can hold signatures.
const signsBytes = 1 << 20

// errUnreadable is in the errors about a device that may be blank, and cannot be read now.
var errUnreadable = errors.New("see the kernel's log")

// refuseUnlessBlank returns FailedPrecondition unless the device is blank (guard.go has the
// proof), and Unavailable if it cannot be read. If more than limit bytes may be data, it reads none of them.
func (h *Host) refuseUnlessBlank(ctx context.Context, d *device, limit int64) error {
	if err := claim(ctx, d); err != nil {
		return err
	}
	if hole, err := d.isHole(ctx); hole || err != nil {
		return err
	}
	var p proof
	var err error
	if _, sb, other := h.recognise(d); other != nil {
		p.found, p.failed = other.Found, other.Unreadable
	} else if sb != nil {
		p.found = sb.fsType + " file system"
	} else if p, err = proveBlank(ctx, d, limit); err != nil {
		return err
	}
	if p.unread > 0 {
		p.found = p.describeUnread()
	}
	if p.failed {
		return state.Errorf(state.Unavailable, "only a blank device is formatted; found %s: %w", p.found, errUnreadable)
	}
	if p.found != "" {
		return state.Errorf(state.FailedPrecondition, "only a blank device is formatted; found %s", p.found)
	}
	return nil
}

// describeUnread says why a device is not read to be proven blank.
func (p proof) describeUnread() string {
	return fmt.Sprintf("no known signature, and %.1f GiB that may be data: no more than %.1f GiB are read to prove a volume blank", gib(p.unread), gib(ProveLimit))
}

// claim claims the device (O_EXCL) and lets go of it at once: an error when
// somebody has it mounted or claimed. It is not kept until mkfs claims the
// device itself, because every child that is forked meanwhile keeps it, too,
// from its fork to its exec, and mkfs would be refused. That still happens, rarely, by
// one that was forked in this moment. mkfs is not run again here, because whoever holds the
// device may write to it: Format says EBUSY, and its next call proves the device blank anew.
func claim(ctx context.Context, d *device) error {
	f, err := devnode.Claim(ctx, d.number, func() (*os.File, error) {
		again, err := d.again(unix.O_EXCL)
		if err != nil {
			return nil, err
		}
		return again.File, nil
	})
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("somebody has it mounted or claimed: %w", err)
	}
	if err != nil {
		return err
	}
	return f.Close()
}
