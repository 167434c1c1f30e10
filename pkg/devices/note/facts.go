// Package note keeps what must survive a reboot and cannot be kept with the data: the
// facts about formatting of devices whose backend has no place for them, and what a
// backend has to remember about its attachments.
//
// A note is as old as the data: it stays when the volume is unstaged or its
// PersistentVolume is deleted, and ends when the volume is cleared, or when an
// operator removes the file. Without its note a device is judged by what is on it:
// a file system is mounted, a blank device is formatted, all else is refused.
package note

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/boot"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/state"
)

// Facts keeps the facts about formatting by what the device says that it is
// (state.Device.Identity), whichever volume it is and wherever it is plugged in. It
// is the devices.Facts of a Set.
//
// A format has two phases. First a trial is noted (TryFormat), which is no mark: earlier
// versions do not see it. Then BeginFormat sets the mark, with the UUID of the trial; earlier
// versions take it for one of theirs, and drop the UUID when they write the note.
//
// A device without an identity has a note by its volume's id. Whether another device has
// become the volume is then seen only by the file system that was made on it. So facts that
// only forbid something stay valid (it was formatted, it was raw). The mark that lets a
// device be erased is valid only for the same device: until it is detached, or the machine
// rebooted.
type Facts struct {
	dir   Dir
	locks keylock.Map
	boot  string
	// durable is false for a note whose sync failed, true for one that is known to be durable. Of
	// others it is not known: the process before may have been killed before it synced them.
	durable sync.Map                     // by key
	sync    func(directory string) error // durable.SyncDir, but in tests
}

// Open returns the facts that are kept in a directory of a --lib-dir.
func Open(libDir string) (*Facts, error) {
	bootID, err := boot.ID()
	if err != nil {
		return nil, err
	}
	return &Facts{dir: Dir(filepath.Join(libDir, "notes")), boot: bootID, sync: durable.SyncDir}, nil
}

// fact is the note of one device.
type fact struct {
	Volume     string `json:"volume"` // the volume that the device was last
	Backend    string `json:"backend,omitempty"`
	Formatting bool   `json:"formatting,omitempty"`
	// UUID is the UUID of the format: recognised contents that do not bear it were not left
	// by the format. Marks of earlier versions, and of a clearing, have no UUID.
	UUID string `json:"uuid,omitempty"`
	// Trial is the UUID of the stamp that was last to be written, before the mark was set. It
	// lets nothing be erased but that stamp. Earlier versions do not know it, and see no mark.
	Trial     string `json:"trial,omitempty"`
	Formatted string `json:"formatted,omitempty"`
	// Made is the UUID of the file system that was made on a device without an identity, which
	// can be known by that alone.
	Made string `json:"made,omitempty"`
	Raw  bool   `json:"raw,omitempty"`
	// Cleared is the device that was cleared, if this plugin has given it to nobody since.
	Cleared *sighting `json:"cleared,omitempty"`
	// WasCleared is what Cleared was before a format was begun that was given up.
	WasCleared *sighting `json:"wasCleared,omitempty"`
	// Seen is the device on which a format was begun; of one without identity, the device
	// of which the note was written.
	Seen *sighting `json:"seen,omitempty"`
}

// sighting distinguishes a device from all others until the next boot.
type sighting struct {
	Boot     string             `json:"boot"`
	Number   state.DeviceNumber `json:"number"`
	Sequence uint64             `json:"sequence"`
}

func keyOf(v devices.Volume, d state.Device) string {
	if d.Identity != "" {
		return deviceKey(d.Identity)
	}
	return volumeKey(v)
}

func deviceKey(identity string) string { return "device " + identity }

func volumeKey(v devices.Volume) string { return "volume " + v.Backend + " " + v.ID }

// read returns the note of a device. Of one that has none and tells an identity, what was made of
// a device of the volume that told none counts: it may be that one, which tells more now, or
// another at its path. That it was raw does not: pods write to this one only once it is noted here.
func (f *Facts) read(v devices.Volume, d state.Device) (fact, error) {
	n, was := fact{}, fact{}
	found, err := f.dir.Read(keyOf(v, d), &n)
	if found || err != nil || d.Identity == "" {
		return n, err
	}
	_, err = f.dir.Read(volumeKey(v), &was)
	return fact{Volume: was.Volume, Backend: was.Backend, Formatted: was.Formatted, Made: was.Made}, err
}

// Tell adds to a device what is noted about it. If that cannot be read, it sets Device.Err.
func (f *Facts) Tell(v devices.Volume, d *state.Device) {
	if d.Missing && !d.Attached() {
		return
	}
	n, err := f.read(v, *d)
	err = errors.Join(err, f.settleFailed(keyOf(v, *d)))
	d.Formatting, d.Formatted, d.Raw, d.Fresh = n.Formatting, n.Formatted, n.Raw, f.isAsCleared(n, *d)
	d.Noted, d.Trial, d.MadeUUID = true, n.Trial, n.Made
	d.WasCleared = d.Attached() && f.isStill(n.WasCleared, *d)
	if n.Formatting {
		d.FormatUUID = n.UUID
	}
	d.StaleMark = n.Formatting && d.Attached() && !f.isStill(n.Seen, *d)
	if err == nil && d.Attached() {
		err = f.check(v, *d, n)
	}
	if err != nil {
		d.Err = errors.Join(d.Err, fmt.Errorf("volume %s: %w", v.ID, err))
	}
}

// Raw returns an error that names the note if a device was published as a raw block volume,
// or if its note is damaged: what is on it was written by pods. That is not known of a
// device without an identity.
func (f *Facts) Raw(number state.DeviceNumber) error {
	info, err := blockdev.InfoOf(number)
	if err != nil {
		return err
	}
	for kind, value := range info.Identities {
		n, key := fact{}, deviceKey(string(kind)+":"+value)
		if _, err := f.dir.Read(key, &n); err != nil {
			return err
		}
		if n.Raw {
			return fmt.Errorf("it was the raw block volume %s, so pods have written what is on it; if the node has it for itself now, remove the note %s", n.Volume, f.dir.Path(key))
		}
	}
	return nil
}

// check returns FailedPrecondition for a mark that may be another device's.
func (f *Facts) check(v devices.Volume, d state.Device, n fact) error {
	if !n.Formatting || d.Identity != "" || n.Seen == nil || f.isStill(n.Seen, d) {
		return nil
	}
	return state.Errorf(state.FailedPrecondition, "a format of the volume, or its clearing, was begun and has not ended, and the device %s tells nothing by which it could be known as the one on which it was: it is not erased. See what is on it, and remove the note %s", d.Path, f.dir.Path(keyOf(v, d)))
}

// isAsCleared reports whether a device that was cleared may be taken for blank. Others may
// have used it since, here or on another node, and the note would not say so. So a device
// that is small enough is read. A larger one is believed to be blank until it is unplugged,
// or the machine rebooted.
func (f *Facts) isAsCleared(n fact, d state.Device) bool {
	return d.Size > filesystem.ProveLimit && d.Attached() && f.isStill(n.Cleared, d)
}

// isStill reports whether an attached device is the one that was seen, and was neither
// unplugged nor the machine rebooted since.
func (f *Facts) isStill(seen *sighting, d state.Device) bool {
	now, err := f.sight(d)
	return err == nil && seen != nil && now == *seen && now.Sequence != 0
}

// sight returns the sighting of a device; that of a device that is not attached matches
// none.
func (f *Facts) sight(d state.Device) (sighting, error) {
	if !d.Attached() {
		return sighting{Boot: f.boot}, nil
	}
	info, err := blockdev.InfoOf(d.Number)
	return sighting{Boot: f.boot, Number: d.Number, Sequence: info.Sequence}, err
}

// TryFormat implements devices.Facts. The device is still as it was cleared, if it was.
func (f *Facts) TryFormat(ctx context.Context, v devices.Volume, d state.Device) (trial string, err error) {
	if err := usable(v, d); err != nil {
		return "", err
	}
	trial = uuid.NewString()
	return trial, f.edit(ctx, v, d, func(n *fact) error {
		if err := f.formattable(v, d, *n); err != nil {
			return err
		}
		n.Formatting, n.UUID, n.Trial = false, "", trial
		return nil
	})
}

// BeginFormat implements devices.Facts.
func (f *Facts) BeginFormat(ctx context.Context, v devices.Volume, d state.Device) error {
	if err := usable(v, d); err != nil {
		return err
	}
	return f.edit(ctx, v, d, func(n *fact) error {
		if err := f.formattable(v, d, *n); err != nil {
			return err
		}
		if n.Trial != "" || !n.Formatting {
			n.UUID, n.Trial = n.Trial, ""
		}
		now, err := f.sight(d)
		n.WasCleared = cmp.Or(n.Cleared, n.WasCleared)
		n.Formatting, n.Cleared, n.Seen = true, nil, &now
		return err
	})
}

// formattable returns FailedPrecondition for a device on which no format may be begun.
func (f *Facts) formattable(v devices.Volume, d state.Device, n fact) error {
	if n.Formatted != "" {
		return state.Errorf(state.FailedPrecondition, "volume %s: it was formatted as %s before, and is never formatted again", v.ID, n.Formatted)
	}
	if n.Raw {
		return state.Errorf(state.FailedPrecondition, "volume %s: it was published as a raw block device, and is never formatted unless it is cleared", v.ID)
	}
	if err := f.check(v, d, n); err != nil {
		return fmt.Errorf("volume %s: %w", v.ID, err)
	}
	return nil
}

// EndFormat is devices.Formatter's, for a device that was found.
func (f *Facts) EndFormat(ctx context.Context, v devices.Volume, d state.Device, fsType string) error {
	if err := usable(v, d); err != nil {
		return err
	}
	return f.edit(ctx, v, d, func(n *fact) error {
		if !n.Formatting && n.Formatted != fsType {
			return state.Errorf(state.FailedPrecondition, "volume %s: the end of a format as %s, and none was begun", v.ID, fsType)
		}
		if n.Formatting && d.Identity == "" && filesystem.TakesUUID(fsType) {
			n.Made = n.UUID
		}
		n.Formatting, n.UUID, n.Trial, n.Formatted, n.WasCleared = false, "", "", fsType, nil
		return nil
	})
}

// AbandonFormat clears the formatting mark of a device that was found. If the stamp of a
// trial turns up on it, that is still known. One that was cleared before is not taken for blank
// any more: it may have been claimed by somebody who writes to it.
func (f *Facts) AbandonFormat(ctx context.Context, v devices.Volume, d state.Device) error {
	if err := usable(v, d); err != nil {
		return err
	}
	return f.edit(ctx, v, d, func(n *fact) error {
		n.Formatting, n.UUID, n.Cleared, n.Seen = false, "", nil, nil
		return nil
	})
}

// BeginRaw is devices.Formatter's, for a device that was found.
func (f *Facts) BeginRaw(ctx context.Context, v devices.Volume, d state.Device) error {
	if err := usable(v, d); err != nil {
		return err
	}
	return f.edit(ctx, v, d, func(n *fact) error {
		n.Raw, n.Cleared, n.WasCleared, n.Trial = true, nil, nil, ""
		return nil
	})
}

// Clear marks the device as one to be erased, lets clear make it zero, and
// forgets what it was used for. If nothing was written, all is noted as before: the device
// holds what it held, and must not be erased later.
func (f *Facts) Clear(ctx context.Context, v devices.Volume, d state.Device, clear func() error) error {
	var before *fact
	err := f.edit(ctx, v, d, func(n *fact) error {
		was := *n
		before = &was
		*n = fact{Formatting: true, Seen: f.sightCleared(d)}
		return nil
	})
	unwritten := err != nil // and yet the mark may be there, if it is not known to be durable
	if err == nil {
		err = clear()
		unwritten = errors.As(err, new(*state.Unwritten))
	}
	if unwritten && before != nil {
		return errors.Join(err, f.edit(context.WithoutCancel(ctx), v, d, func(n *fact) error {
			*n = *before
			return nil
		}))
	}
	if err != nil {
		return err
	}
	return f.edit(ctx, v, d, func(n *fact) error {
		n.Formatting, n.Cleared = false, f.sightCleared(d)
		return nil
	})
}

// Forget implements devices.Facts.
func (f *Facts) Forget(ctx context.Context, v devices.Volume, d state.Device) error {
	keys := []string{volumeKey(v)}
	if d.Identity != "" {
		keys = append(keys, deviceKey(d.Identity))
	}
	for _, key := range keys {
		if err := f.forget(ctx, key, v); err != nil {
			return fmt.Errorf("volume %s: remove the note about its device: %w", v.ID, err)
		}
	}
	return nil
}

// forget removes a note, unless another volume has the device by now.
func (f *Facts) forget(ctx context.Context, key string, v devices.Volume) error {
	unlock, err := f.locks.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	if key != volumeKey(v) {
		var n fact
		if found, err := f.dir.Read(key, &n); !found || err != nil || n.Volume != v.ID || n.Backend != v.Backend {
			return err
		}
	}
	f.durable.Delete(key)
	return f.dir.Remove(key)
}

// sightCleared returns a device that was cleared, though it is not attached; nil: which it
// is cannot be known.
func (f *Facts) sightCleared(d state.Device) *sighting {
	info, err := blockdev.Look(cmp.Or(d.Path, d.Backing))
	if err != nil || !info.Has(d.Identity) {
		return nil
	}
	return &sighting{Boot: f.boot, Number: info.Number, Sequence: info.Sequence}
}

// usable returns an error for a device of which nothing may be noted now: another
// disk may be in its place.
func usable(v devices.Volume, d state.Device) error {
	switch {
	case d.Missing:
		return state.Errorf(state.NotFound, "volume %s: no such volume on this node", v.ID)
	case !d.Attached() || d.ReadOnly:
		return state.Errorf(state.FailedPrecondition, "volume %s: it is not attached for writing", v.ID)
	case d.Err != nil:
		return fmt.Errorf("volume %s: %w", v.ID, d.Err)
	}
	return nil
}

// edit changes the note of a device, durably.
func (f *Facts) edit(ctx context.Context, v devices.Volume, d state.Device, change func(*fact) error) error {
	key := keyOf(v, d)
	unlock, err := f.locks.Lock(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	n, err := f.read(v, d)
	if err != nil {
		return fmt.Errorf("volume %s: %w", v.ID, err)
	}
	before := n
	if err := change(&n); err != nil {
		return err
	}
	n.Volume, n.Backend = v.ID, v.Backend
	if d.Identity == "" {
		now, err := f.sight(d)
		if err != nil {
			return fmt.Errorf("volume %s: %w", v.ID, err)
		}
		if n.Seen == nil || *n.Seen != now {
			n.Seen = &now
		}
	}
	if n == before {
		err = f.settle(key)
	} else if err = f.dir.write(key, n); err == nil {
		err = f.sync(string(f.dir))
		f.durable.Store(key, err == nil)
	}
	if err != nil {
		return fmt.Errorf("volume %s: note what becomes of its device: %w", v.ID, err)
	}
	return nil
}

// settle makes the note that is seen durable, unless it is known to be. The caller has its turn.
func (f *Facts) settle(key string) error {
	if durable, _ := f.durable.Load(key); durable == true {
		return nil
	}
	err := f.sync(string(f.dir))
	if errors.Is(err, os.ErrNotExist) { // then there is no note
		err = nil
	}
	f.durable.Store(key, err == nil)
	return err
}

// settleFailed makes a note durable whose sync failed: whoever is told it believes that it lasts.
func (f *Facts) settleFailed(key string) error {
	if durable, known := f.durable.Load(key); !known || durable == true {
		return nil
	}
	unlock, err := f.locks.Lock(context.Background(), key)
	if err != nil {
		return err
	}
	defer unlock()
	return f.settle(key)
}

// Erase is devices.Eraser's, through a device of which Tell has told.
func (f *Facts) Erase(ctx context.Context, v devices.Volume, d state.Device) (err error) {
	if err := usable(v, d); err != nil {
		return fmt.Errorf("erase: %w", err)
	}
	defer state.Wrap(&err, "volume %s: erase", v.ID)
	if !d.Formatting || d.StaleMark {
		return state.Errorf(state.FailedPrecondition, "no format was begun on it just now that was not ended, so its contents may be data")
	}
	file, err := devnode.Claim(ctx, d.Number, func() (*os.File, error) {
		return blockdev.OpenFound(d, os.O_RDWR|unix.O_EXCL)
	})
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("%s is mounted or claimed, perhaps by a mkfs that has not ended: %w", d.Path, err)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	n, err := f.read(v, d)
	if err == nil && !f.isStill(n.Seen, d) { // while the device is open, it keeps its number
		err = fmt.Errorf("%s is another device than the one on which the format was begun", d.Path)
	}
	if err != nil {
		return err
	}
	return blockdev.Zero(ctx, file, d.Size, nil)
}
