package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Find tells what is known of the volume's disk by its note and sysfs; it opens no
// disk but a loop device. A disk is attached while its note says so and it is there, whatever
// has become of the link that named it. One that has gone is absent with the
// number that it had, by which its mounts are known, until another disk has
// that number. Where the note was lost, it is the number of the disk that is asked
// for, if that is mounted.
func (b *Backend) Find(_ context.Context, v devices.Volume) (state.Device, error) {
	c, s, err := b.known(v)
	if state.ClassOf(err) == state.InvalidArgument {
		return state.Device{}, err
	}
	d := state.Device{State: state.DeviceAbsent, Err: err, Identity: c.Identity}
	if s.empty() {
		d.Missing = err == nil
		return d, nil
	}
	if c.Attached != nil {
		info, err := blockdev.InfoOf(c.Attached.Number)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return state.Device{}, fmt.Errorf("volume %s: find: %w", v.ID, err)
		}
		if err != nil || !c.replaced(info) {
			d.Number = c.Attached.Number
		}
		if err == nil && info.Size > 0 && c.is(info) && c.identityOf(info) == c.Identity {
			d.State, d.Path, d.ReadOnly = state.DeviceAttached, info.Path, info.ReadOnly
			d.Size, d.Backing = info.Size, info.Path
			// A view keeps a partition open: else its mode is lost when the table is read again.
			d.Commands = info.ReadOnly && (info.TakesCommands() || info.Partition != 0)
			return d, nil
		}
	}
	info, err := b.resolve(s)
	switch {
	case errors.Is(err, devices.ErrNoDevice), state.ClassOf(err) == state.FailedPrecondition: // which Attach says
		return d, nil
	case err != nil: // it is not attached, and its end needs no disk
		d.Err = errors.Join(d.Err, fmt.Errorf("volume %s: find: %w", v.ID, err))
		return d, nil
	}
	d.Size, d.Identity, d.Backing = info.Size, c.identityOf(info), info.Path
	if d.Err != nil || c.Volume == "" && len(blockdev.MountedAt(info.Number, info.Path)) > 0 { // whatever is mounted from it, where the volume is, is the volume's
		d.Number = info.Number
	}
	return d, nil
}

// look returns what is known of a volume, and its disk. NotFound: nothing tells which disk
// that is. Other errors are those of known and resolve.
func (b *Backend) look(v devices.Volume) (c claim, s spec, info blockdev.Info, err error) {
	c, s, err = b.known(v)
	if err == nil && s.empty() {
		err = state.Errorf(state.NotFound, "its context names no disk, and no note tells which it is")
	}
	if err == nil {
		info, err = b.resolve(s)
	}
	return c, s, info, err
}

// resolve returns the disk that is asked for. ErrNoDevice: it is not there.
// FailedPrecondition: what is there is another disk, or it is ambiguous.
func (b *Backend) resolve(s spec) (info blockdev.Info, err error) {
	if s.path != "" {
		info, err = blockdev.Look(s.path)
	} else {
		info, err = b.search(s)
	}
	switch {
	case errors.Is(err, os.ErrNotExist):
		return info, fmt.Errorf("%w: %w", devices.ErrNoDevice, err)
	case err != nil:
		return info, err
	case info.Size == 0: // a drive without a medium, a loop device without a file
		return info, fmt.Errorf("%s has no medium: %w", info.Path, devices.ErrNoDevice)
	}
	return info, s.verify(info)
}

// verify returns FailedPrecondition unless the device is all that was asked for.
func (s spec) verify(info blockdev.Info) error {
	for kind, value := range s.ids {
		if !info.Is(kind, value) {
			return state.Errorf(state.FailedPrecondition, "%s is asked for, and %s is another disk: it has %s", s, info.Path, told(info))
		}
	}
	return nil
}

func told(info blockdev.Info) string {
	return cmp.Or(strings.Join(inWords(info.Identities), ", "), "no identity")
}

// search finds a disk by its identity: where it was last, else among all.
func (b *Backend) search(s spec) (blockdev.Info, error) {
	var kind blockdev.IdentityKind
	for _, k := range blockdev.IdentityKinds {
		if s.ids[k] != "" {
			kind = k
			break
		}
	}
	key := string(kind) + ":" + s.ids[kind]
	b.mu.Lock()
	hint, hinted := b.hints[key]
	b.mu.Unlock()
	if hinted {
		if info, err := blockdev.InfoOf(hint); err == nil && info.Is(kind, s.ids[kind]) && b.ofPods(info) == nil {
			return info, nil
		}
	}
	found, err := blockdev.Search(kind, s.ids[kind])
	if own := slices.DeleteFunc(slices.Clone(found), func(i blockdev.Info) bool { return b.ofPods(i) != nil }); len(own) > 0 {
		found = own // a pod can give a partition of its raw disk any partUUID
	}
	switch {
	case err != nil:
		return blockdev.Info{}, err
	case len(found) == 0:
		told := ""
		if kind == blockdev.PartUUID {
			told = " (Linux tells those from 6.13 on; before that name the partition by its path)"
		}
		return blockdev.Info{}, fmt.Errorf("no block device has the %s %s%s: %w", kind, s.ids[kind], told, os.ErrNotExist)
	case len(found) > 1:
		var paths []string
		for _, info := range found {
			paths = append(paths, info.Path)
		}
		return blockdev.Info{}, state.Errorf(state.FailedPrecondition, "several block devices have the %s %s: %s. If they are paths to one disk, name the device that the device mapper makes of them by its dmUUID; if they are several namespaces or copies, name another identity", kind, s.ids[kind], strings.Join(paths, ", "))
	}
	b.mu.Lock()
	b.hints[key] = found[0].Number
	b.mu.Unlock()
	return found[0], nil
}

// ofPods returns an error that says why if a device is a partition of a disk that is a raw volume, or
// was one: pods have made it.
func (b *Backend) ofPods(info blockdev.Info) error {
	if info.Partition == 0 || b.raw == nil {
		return nil
	}
	if err := b.raw(info.Disk); err != nil {
		return fmt.Errorf("it is a partition of /dev/%s: %w", info.Parent, err)
	}
	return nil
}

// same returns FailedPrecondition for another disk than the volume had before,
// unless it is named by what it is.
func same(c claim, s spec, info blockdev.Info) error {
	if c.Identity == "" || len(s.ids) > 0 || info.Has(c.Identity) {
		return nil
	}
	return state.Errorf(state.FailedPrecondition, "the volume was the disk %s before, and at %s is another now: it has %s. Nothing is done to it. If the volume is to be that disk, give it another volume handle, or name the disk by its identity", c.Identity, s.path, told(info))
}
