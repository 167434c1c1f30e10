package lvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/process"
	"github.com/csi-node/csi-node/pkg/state"
)

// Attach activates the volume, and sees that its device has a node. A thick volume that
// nobody has had is zeroed first; ctx gets the progress.
//
// FailedPrecondition: it is held in the other mode, or its thin pool would show it what
// others have written, or the group of that name is another one, or the metadata of the group
// says of a volume that was used that it was not. ErrNoDevice: its group is not on this node.
func (b *Backend) Attach(ctx context.Context, v devices.Volume, readOnly bool) (err error) {
	defer state.Wrap(&err, "volume %s: attach", v.ID)
	at, done, err := b.locateAlone(ctx, v)
	if err != nil {
		return err
	}
	defer done()
	t := at.volume.tags
	if t.unzeroed {
		b.note(b.zeroing, deviceName(at.group, at.volume.name), true)
		defer b.note(b.zeroing, deviceName(at.group, at.volume.name), false)
	}
	if t.unzeroed || t.fresh || t.formatting || at.volume.pool != "" { // else no old report says less than is so
		if at, err = b.lookAgain(ctx, at); err != nil {
			return err
		}
	}
	if pool, thin := at.report.pools[at.volume.pool]; thin && !pool.zeroes {
		return unzeroedPool(at.group, pool.name)
	}
	if err := b.refuseUsed(at); err != nil {
		return err
	}
	d, err := b.activate(ctx, at)
	if err != nil {
		return err
	}
	if at.volume.tags.unzeroed {
		if err := b.zeroFirst(ctx, at, d); err != nil {
			return errors.Join(err, b.deactivate(context.WithoutCancel(ctx), at.group, at.volume.name))
		}
	}
	b.noteUsed(ctx, at)
	return setReadOnly(ctx, d, readOnly)
}

// unzeroedPool is the refusal of a thin pool whose volumes show what was in their blocks.
func unzeroedPool(group, pool string) error {
	return state.Errorf(state.FailedPrecondition, "the thin pool %s/%s does not zero the blocks that it hands out, so that a volume would show what others have written: lvchange --zero y %s/%s", group, pool, group, pool)
}

// activate returns the device of a volume, which it makes if there is none.
func (b *Backend) activate(ctx context.Context, at place) (*mapper.Device, error) {
	d, err := at.device()
	if err != nil || d != nil {
		return d, err
	}
	if err := b.inTurn(ctx, at.group, turnLimit, func(ctx context.Context) error {
		if at.volume.layout.raid1 {
			if err := b.awaitLegs(ctx, at.group); err != nil {
				return err
			}
		}
		_, err := b.command(ctx, at.group, "lvchange", "--activate", "y", "--yes", at.path())
		return err
	}); err != nil {
		return nil, err
	}
	d, err = at.device()
	if err == nil && d == nil {
		err = fmt.Errorf("lvm has activated the logical volume %s, and there is no such device", at.path())
	}
	if err != nil {
		return nil, err
	}
	f, err := open(d, os.O_RDONLY) // makes the node where there is none
	if err != nil {
		return nil, err
	}
	return d, f.Close()
}

// awaitLegs finds the disks of a group anew before a mirror of it is activated. LVM would
// also activate a mirror with a single leg, and the other leg, whose disk may only have
// come late, would be out of date from then on. Unavailable: a disk that may be the group's
// does not answer, or counts as a pod's. A disk that is not there at all is not waited for.
func (b *Backend) awaitLegs(ctx context.Context, group string) error {
	m, err := b.findMembers(ctx, group, "")
	if err == nil && m.missing > 0 && m.hidden.any() {
		err = state.Errorf(state.Unavailable, "the volume group %s lacks disks%s: a mirror is not activated without them", group, m.perhaps())
	}
	return err
}

// open opens the node of a device.
func open(d *mapper.Device, flags int) (*os.File, error) {
	path, err := devnode.PathOf(d.Number)
	if err != nil {
		return nil, err
	}
	return devnode.Open(path, d.Number, flags)
}

// claim opens the node of a device O_EXCL. EBUSY: it is mounted or claimed.
func claim(ctx context.Context, d *mapper.Device, mode int) (*os.File, error) {
	return devnode.Claim(ctx, d.Number, func() (*os.File, error) { return open(d, mode|unix.O_EXCL) })
}

// setReadOnly sets the mode of a device. FailedPrecondition: it has the other one and is
// in use, or LVM lets nobody write to it.
func setReadOnly(ctx context.Context, d *mapper.Device, readOnly bool) (err error) {
	info, err := blockdev.InfoOf(d.Number)
	if err != nil || info.ReadOnly == readOnly {
		return err
	}
	f, err := claim(ctx, d, os.O_RDONLY)
	if errors.Is(err, unix.EBUSY) {
		return state.Errorf(state.FailedPrecondition, "%s is in use in the other mode: %s", info.Path, info.Users(ctx))
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	switch now, err := blockdev.SetReadOnly(f, readOnly); {
	case err != nil:
		return err
	case now != readOnly:
		return state.Errorf(state.FailedPrecondition, "%s takes no writes, as LVM has made it read-only: lvchange --permission rw of the logical volume changes that, unless lvm.conf has it in read_only_volume_list", info.Path)
	}
	return nil
}

// Detach deactivates the volume. It needs the id alone, and where LVM cannot read the
// group, such as when its disks are gone, it has the device mapper remove the device.
func (b *Backend) Detach(ctx context.Context, v devices.Volume) (err error) {
	id, own, err := parseID(v.ID)
	if err != nil || !own {
		return err
	}
	defer state.Wrap(&err, "volume %s: detach", v.ID)
	done, err := b.volumes.Lock(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	d, group, err := b.active(id)
	if err != nil || d == nil {
		return err
	}
	info, err := blockdev.InfoOf(d.Number)
	if err != nil {
		return err
	}
	f, err := claim(ctx, d, os.O_RDONLY)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s is in use: %s: %w", info.Path, info.Users(ctx), err)
	case err == nil:
		err = f.Close()
	}
	if err != nil {
		return err
	}
	views, err := info.Loops() // which do not claim it
	if err != nil {
		return err
	}
	if len(views) > 0 {
		return fmt.Errorf("%s is in use: %s is over it", info.Path, strings.Join(views, ", "))
	}
	if r := b.cachedReport(group, 0); r != nil && r.uuid == id.group { // a version that made no notes may have attached it
		if lv, has := r.volumes[id.name]; has && !lv.tags.unzeroed {
			b.noteUsed(ctx, place{group, lv, r})
		}
	}
	return b.deactivate(ctx, group, id.name)
}

// deactivate makes a logical volume inactive.
func (b *Backend) deactivate(ctx context.Context, group, lv string) error {
	device := deviceName(group, lv)
	err := fmt.Errorf("the volume group %s is not one of those of --lvm-groups", group)
	if slices.Contains(b.names, group) {
		err = b.inTurn(ctx, group, turnLimit, func(ctx context.Context) error {
			_, err := b.command(ctx, group, "lvchange", "--activate", "n", group+"/"+lv)
			return err
		})
	}
	d, lookErr := mapper.Find(device)
	switch {
	case lookErr == nil && d == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case lookErr != nil:
		return errors.Join(err, lookErr)
	case d.Opens > 0:
		return errors.Join(err, fmt.Errorf("%s is open: %s", device, process.Openers(ctx, d.Number)))
	}
	klog.FromContext(ctx).Error(err, "LVM does not deactivate a logical volume that nobody has open: its device is removed without LVM", "group", group, "logicalVolume", lv)
	return removeDevices(d)
}

// removeDevices removes a device, and those of its group that it is made of and that nothing else
// has open, from the device mapper: the legs of a mirror, a thin pool.
func removeDevices(d *mapper.Device) error {
	dir, err := filepath.EvalSymlinks("/sys/dev/block/" + d.Number.String())
	if err != nil {
		return err
	}
	all, err := lineage(filepath.Base(dir))
	if err != nil {
		return err
	}
	names := []string{d.Name}
	group := d.UUID[:min(len(d.UUID), len(uuidPrefix)+32)] // which begins the UUID of each of its devices
	for _, below := range all[1:] {
		if name, uuid := mapper.Named(below); strings.HasPrefix(group, uuidPrefix) && strings.HasPrefix(uuid, group) {
			names = append(names, name)
		}
	}
	for _, name := range names { // what lies over another one comes before it
		switch below, err := mapper.Find(name); {
		case err != nil:
			return err
		case below == nil, below.Opens > 0:
			continue // another volume of the pool has it
		}
		if err := mapper.Remove(name); err != nil {
			return err
		}
	}
	return nil
}
