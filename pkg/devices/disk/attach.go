package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/mounttable"
	"github.com/csi-node/csi-node/pkg/internal/poll"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// claimTime is how long to wait for the end of somebody else's claim. The kernel
	// sends no event when it ends, so the claim is tried every claimInterval.
	claimTime     = 500 * time.Millisecond
	claimInterval = 10 * time.Millisecond
)

// Attach takes the disk for the volume.
//
// FailedPrecondition: it is another disk than is asked for, or than the volume was
// before; it is in use by anybody else; it has partitions or is a member of LVM or RAID,
// and was not the volume before; it takes no writes.
// ErrNoDevice: it is not there. Nothing was done to the disk then.
func (b *Backend) Attach(ctx context.Context, v devices.Volume, readOnly bool) (err error) {
	defer state.Wrap(&err, "volume %s: attach", v.ID)
	done, err := b.volumes.Lock(ctx, v.ID)
	if err != nil {
		return err
	}
	defer done()
	c, s, info, err := b.look(v)
	if errors.Is(err, devices.ErrNoDevice) {
		return state.Errorf(state.Unavailable, "the disk (%s) is not there: see that it is attached to the node, and that the node's /dev is the plugin's: %w", s, err)
	}
	if err != nil {
		return err
	}
	return b.take(ctx, v, c, s, info, readOnly)
}

// turn waits until nobody else works on the disk, by whatever path, or on a
// partition of it.
func (b *Backend) turn(ctx context.Context, info blockdev.Info) (done func(), err error) {
	disk := info
	if info.Partition != 0 {
		if disk, err = blockdev.InfoOf(info.Disk); err != nil {
			return nil, fmt.Errorf("the disk of %s: %w", info.Path, err)
		}
	}
	keys := []string{disk.Number.String()} // always in this order, so that two callers never wait for each other
	for _, known := range []blockdev.Info{disk, info} {
		if identity := known.Identity(); identity != "" && !slices.Contains(keys, identity) {
			keys = append(keys, identity)
		}
	}
	var turns []func()
	done = func() {
		for _, end := range slices.Backward(turns) {
			end()
		}
	}
	for _, key := range keys {
		end, err := b.disks.Lock(ctx, key)
		if err != nil {
			done()
			return nil, err
		}
		turns = append(turns, end)
	}
	return done, nil
}

// take makes the disk the volume's.
func (b *Backend) take(ctx context.Context, v devices.Volume, c claim, s spec, info blockdev.Info, readOnly bool) (err error) {
	done, err := b.turn(ctx, info)
	if err != nil {
		return err
	}
	defer done()
	if err := same(c, s, info); err != nil {
		return err
	}
	held := c.is(info)
	if held && info.ReadOnly == readOnly {
		return nil
	}
	if err := b.free(v, c, info); err != nil {
		return err
	}
	own := c.Attached != nil && c.Attached.Number == info.Number // its pods keep the number, or have a view of it
	if !own {
		if err := unbound(info); err != nil {
			return err
		}
	}
	f, now, err := open(ctx, info, s, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer rawfile.CloseAfter(f, &err)
	if len(now.Holders) > 0 {
		return state.Errorf(state.FailedPrecondition, "%s is in use: %s", now.Path, now.Users(ctx))
	}
	over, ofParts, err := now.LoopsOnDisk()
	if err != nil {
		return err
	}
	over = slices.DeleteFunc(over, func(path string) bool { return b.isOwnView(v, path, own) })
	if !own { // else they are its pods'
		over = append(over, ofParts...)
	}
	if len(over) > 0 {
		return shownBy(now, over)
	}
	if !s.any && (c.Volume == "" || c.Identity != c.identityOf(now)) { // what is on a disk that it had is its pods', as a virtual machine's
		if err := nobodys(f, now); err != nil {
			return err
		}
	}
	taken := claimOf(v, s, c.identityOf(now))
	wasSet := held && c.Attached.ReadOnly
	set := readOnly && (!now.ReadOnly || wasSet)
	taken.Attached = &attachment{Boot: b.boot, Number: now.Number, Path: now.Path, Sequence: now.Sequence, ReadOnly: set || wasSet}
	if err := b.claims.Write(v.ID, taken); err != nil { // before anything is set, so that Detach knows of it
		return err
	}
	if err := setReadOnly(f, readOnly); err != nil {
		if !held {
			taken.Attached = nil
			err = errors.Join(err, b.claims.Write(v.ID, taken))
		}
		return err
	}
	if wasSet && !set { // which Detach need not take back any more
		taken.Attached.ReadOnly = false
		return b.claims.Write(v.ID, taken)
	}
	return nil
}

// nobodys returns FailedPrecondition for a disk that has partitions, or is a member of LVM or
// RAID, though nobody uses it now.
func nobodys(f *os.File, info blockdev.Info) error {
	if len(info.Partitions) > 0 {
		return state.Errorf(state.FailedPrecondition, "%s has the partitions %s: name one of them, or remove them if the whole disk is to be the volume; %s", info.Path, strings.Join(info.Partitions, ", "), ownContents)
	}
	found, err := filesystem.Membership(f, info.Size)
	if err != nil {
		return fmt.Errorf("see whether %s is a part of anything: %w", info.Path, err)
	}
	if found != "" {
		return state.Errorf(state.FailedPrecondition, "%s is somebody's: it has the %s. If nobody needs it, csi-node volume clear-device makes it blank; %s", info.Path, found, ownContents)
	}
	return nil
}

// ownContents says what to do if a disk is the volume's, and this node does not know that.
const ownContents = "if pods of this very volume have made that, elsewhere or before the note of it was lost here, a PersistentVolume with " + ContentsKey + ": " + anyContents + " in its volumeAttributes takes the disk as it is"

// free returns FailedPrecondition when another volume has the disk, a partition of it or
// the disk that it is a partition of, and Unavailable while the volume itself is mounted from
// what the disk was before it was unplugged.
func (b *Backend) free(v devices.Volume, c claim, info blockdev.Info) error {
	if info.Ours {
		return state.Errorf(state.FailedPrecondition, "%s is a loop device that the plugin, or another like it, has attached for a volume of its own", info.Path)
	}
	for id, other := range b.held() {
		if id == v.ID {
			continue
		}
		if disk, err := blockdev.InfoBySysfs(other.Attached.Number); err == nil && other.is(disk) { // which may hang
			switch {
			case info.SharesDisk(disk):
				return state.Errorf(state.FailedPrecondition, "%s is in use: it is of the same disk as %s, which is the volume %s on this node. Unstage that one first, or name another disk", info.Path, disk.Path, id)
			case info.IsLoopOver(disk):
				return state.Errorf(state.FailedPrecondition, "%s is in use: it is a loop device over %s, which is the volume %s on this node. Unstage that one first, or name another disk", info.Path, disk.Path, id)
			}
		}
		if other.is(info) || info.Has(other.Identity) && other.stands() {
			return state.Errorf(state.FailedPrecondition, "%s is the volume %s on this node (there as the device %s): a disk is one volume at a time. Unstage that one first, or name another disk", info.Path, id, other.Attached.Number)
		}
	}
	if c.is(info) {
		return nil
	}
	if err := b.ofPods(info); err != nil {
		return state.Errorf(state.FailedPrecondition, "%s is somebody's: %w", info.Path, err)
	}
	if c.Attached == nil {
		return nil
	}
	if places := c.mountedAt(); len(places) > 0 {
		return state.Errorf(state.Unavailable, "the disk has come back as %s (%s), and is still mounted as the device %s that it was, at %s: unpublish and unstage the volume first", info.Path, info.Number, c.Attached.Number, strings.Join(places, ", "))
	}
	return nil
}

// open opens a disk that nobody has, and proves that it is the one that was found.
// FailedPrecondition: somebody has it, or it is another.
func open(ctx context.Context, info blockdev.Info, s spec, mode int) (*os.File, blockdev.Info, error) {
	f, now, err := openAlone(ctx, info, mode)
	if errors.Is(err, unix.EBUSY) {
		return nil, now, state.Errorf(state.FailedPrecondition, "%s is in use: %s: %w", info.Path, info.Users(ctx), err)
	}
	if err != nil {
		return nil, now, err
	}
	err = s.verify(now)
	if err == nil && (now.Number != info.Number || now.Sequence != info.Sequence || now.Identity() != info.Identity()) {
		err = state.Errorf(state.Unavailable, "%s has become another disk meanwhile: it has %s", info.Path, told(now))
	}
	if err != nil {
		return nil, now, errors.Join(err, f.Close())
	}
	return f, now, nil
}

// openAlone opens a disk that nobody has claimed. Programs that look at all disks,
// such as mdadm, claim each for a moment; openAlone waits for that.
func openAlone(ctx context.Context, info blockdev.Info, mode int) (f *os.File, now blockdev.Info, err error) {
	if !poll.Until(ctx, claimInterval, claimTime, func() bool {
		f, now, err = blockdev.Open(info.Path, mode|unix.O_EXCL)
		return !errors.Is(err, unix.EBUSY) || len(info.Holders) > 0 || len(blockdev.MountedAt(info.Number, info.Path)) > 0
	}) {
		err = errors.Join(ctx.Err(), err)
	}
	return f, now, err
}

// setReadOnly sets the mode of an open device. FailedPrecondition: the disk itself takes no writes.
func setReadOnly(f *os.File, readOnly bool) error {
	switch is, err := blockdev.SetReadOnly(f, readOnly); {
	case err != nil:
		return err
	case is != readOnly:
		return state.Errorf(state.FailedPrecondition, "%s takes no writes by itself, and is asked for to be written: ask for it read-only, or see to its write protection", f.Name())
	}
	return nil
}

// Detach gives the disk up: it takes back the read-only mode that Attach has set,
// and does nothing else to it. A disk that is gone, or has become another, is
// given up as it is.
func (b *Backend) Detach(ctx context.Context, v devices.Volume) (err error) {
	done, err := b.volumes.Lock(ctx, v.ID)
	if err != nil {
		return fmt.Errorf("volume %s: detach: %w", v.ID, err)
	}
	defer done()
	c, _, err := b.known(v)
	switch {
	case state.ClassOf(err) == state.InvalidArgument:
		return err
	case state.ClassOf(err) == state.Internal, err == nil && c.Attached == nil: // what a damaged note has said cannot be taken back
		return nil
	}
	defer state.Wrap(&err, "volume %s: detach", v.ID)
	if err == nil {
		err = b.release(ctx, c)
	}
	if err != nil {
		return err
	}
	c.Attached = nil
	if err := b.claims.Write(v.ID, c); err != nil { // where there is no room, a disk goes all the same, and is not known again
		if removeErr := b.claims.Remove(v.ID); removeErr != nil {
			return errors.Join(err, removeErr)
		}
		klog.FromContext(ctx).Error(err, "The note of which disk a volume was is lost", "volume", v.ID, "identity", c.Identity)
	}
	return nil
}

func (b *Backend) release(ctx context.Context, c claim) (err error) {
	info, err := blockdev.InfoOf(c.Attached.Number)
	if errors.Is(err, os.ErrNotExist) || err == nil && !c.is(info) {
		return nil
	}
	if err != nil {
		return err
	}
	done, err := b.turn(ctx, info)
	if err != nil {
		return err
	}
	defer done()
	if err := devnode.Ensure(info.Path, info.Number); err != nil {
		return err
	}
	f, now, err := openAlone(ctx, info, os.O_RDONLY)
	switch {
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s is in use: %s: %w", info.Path, info.Users(ctx), err)
	case isDead(err): // its mode does not matter any more
		klog.FromContext(ctx).Error(err, "Gave up a disk that cannot be opened", "path", info.Path)
		return nil
	case err != nil:
		return err
	}
	defer rawfile.CloseAfter(f, &err)
	views, err := now.Loops() // which do not claim it
	if err != nil {
		return err
	}
	if len(views) > 0 {
		return fmt.Errorf("%s is in use: %s is over it", now.Path, strings.Join(views, ", "))
	}
	if c.Attached.ReadOnly && c.is(now) {
		return setReadOnly(f, false)
	}
	return nil
}

// isDead reports whether a device could not be opened because it is broken, or going away.
func isDead(err error) bool {
	return slices.ContainsFunc([]error{unix.ENXIO, unix.ENODEV, unix.EIO, unix.EREMOTEIO, unix.ETIMEDOUT, unix.ENOLINK, unix.ENOMEDIUM, unix.EMEDIUMTYPE}, func(dead error) bool { return errors.Is(err, dead) })
}

// shownBy is the refusal of a disk that other devices show, which need not claim it.
func shownBy(info blockdev.Info, over []string) error {
	return state.Errorf(state.FailedPrecondition, "%s is in use: %s is over it: detach that first; the read-only loop device of a raw volume, which may be another driver's, goes with its pod", info.Path, strings.Join(over, ", "))
}

// isOwnView reports whether a loop device over a disk is the plugin's read-only view of the volume:
// own says that the volume has the disk already. If what was noted of that is lost, it is published
// as the view.
func (b *Backend) isOwnView(v devices.Volume, path string, own bool) bool {
	number, ok := devnode.NumberAt(path)
	if !ok {
		return false
	}
	info, err := blockdev.InfoOf(number)
	return err == nil && info.Ours && (own || b.volume != nil && b.volume(number) == v.ID)
}

// unbound returns FailedPrecondition if the node of a disk, of a partition of it, or of the
// disk that it is a partition of, is bound in this mount namespace, as raw volumes are shown to
// pods, of whatever driver. They do not claim it.
func unbound(info blockdev.Info) error {
	infos, err := mounttable.Own(func(i *mountinfo.Info) (skip, stop bool) {
		return i.Root == "/" || i.FSType != "devtmpfs" && i.FSType != "tmpfs", false
	})
	if err != nil {
		return fmt.Errorf("see whether %s is shown as a raw block device: %w", info.Path, err)
	}
	var places []string
	for _, i := range infos {
		number, ok := devnode.NumberAt(i.Mountpoint)
		if !ok {
			continue
		}
		if bound, err := blockdev.InfoBySysfs(number); number == info.Number || err == nil && bound.SharesDisk(info) {
			places = append(places, i.Mountpoint)
		}
	}
	if len(places) == 0 {
		return nil
	}
	slices.Sort(places)
	return state.Errorf(state.FailedPrecondition, "%s is in use: it, a part of it, or the disk that it is a part of, is shown as a raw block device at %s: end that first", info.Path, strings.Join(places, ", "))
}
