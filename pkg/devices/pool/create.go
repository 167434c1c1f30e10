package pool

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Create makes a volume of v's ID, Name, Bytes (rounded up to blockSize), Provisioning,
// OvercommitPercent, FSType, SectorBytes, Layers and Ephemeral, and returns it. It is on the
// disk then. If there is such a volume already, that one is returned.
//
// AlreadyExists, with the volume that is there: it was created with other parameters, or
// has grown since. Aborted: its deletion was begun and has not ended. ResourceExhausted:
// there is no room. OutOfRange: larger than a file can be. InvalidArgument: an invalid id,
// or facts that no volume can have.
// A failed Create leaves nothing.
func (p *Pool) Create(ctx context.Context, v Volume) (_ Volume, err error) {
	if v.Bytes, err = roundUp(v.Bytes); err != nil {
		return Volume{}, fmt.Errorf("volume %s: %w", v.ID, err)
	}
	v.OvercommitPercent = cmp.Or(v.OvercommitPercent, devices.NoOvercommit)
	if err := v.check(); err != nil {
		return Volume{}, state.Errorf(state.InvalidArgument, "volume %s: %w", v.ID, err)
	}
	unlock, err := p.volumes.Lock(ctx, v.ID)
	if err != nil {
		return Volume{}, fmt.Errorf("volume %s: create: %w", v.ID, err)
	}
	defer unlock()

	switch have, err := p.Get(ctx, v.ID); {
	case err == nil:
		return have, p.exists(ctx, have, v)
	case state.ClassOf(err) != state.NotFound:
		return Volume{}, err
	}
	v.Version, v.Created, v.Formatting, v.Formatted, v.Raw = volumeVersion, time.Now().UTC().Round(0), false, "", false
	if err := p.build(ctx, &v); err != nil {
		return Volume{}, fmt.Errorf("volume %s: create: %w", v.ID, err)
	}
	return v, nil
}

// exists returns nil if a volume that exists is what is asked for, and AlreadyExists if it is not,
// which may do as well. Either way it is durable then. Aborted: it is half deleted.
func (p *Pool) exists(ctx context.Context, have, asked Volume) error {
	if _, err := os.Stat(p.path(volumesDir, have.ID, dataFile)); errors.Is(err, os.ErrNotExist) {
		return state.Errorf(state.Aborted, "volume %s: it exists already, and its data does not: its deletion was begun and has not ended, or somebody has removed the data. Delete the volume before it is created again", have.ID)
	}
	if err := p.settle(ctx, have.ID); err != nil {
		return err
	}
	if !sameRequest(have, asked) {
		return state.Errorf(state.AlreadyExists, "volume %s: it exists already, with %d bytes, %s, for name %q", have.ID, have.Bytes, have.Provisioning, have.Name)
	}
	return nil
}

// build makes the volume in tmp and moves it to its place. It sets v.Fresh.
func (p *Pool) build(ctx context.Context, v *Volume) (err error) {
	tmp, err := os.MkdirTemp(p.path(tmpDir), v.ID+"~")
	if err != nil {
		return noRoom(fmt.Errorf("make a directory in %s: %w", p.path(tmpDir), errors.Unwrap(err))) // without the name that differs each time
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
			err = state.Reword(err, strings.ReplaceAll(err.Error(), tmp, p.path(tmpDir, v.ID)))
		}
	}()
	// The lock tells other processes that tmp is in use.
	lock, err := rawfile.Open(tmp, os.O_RDONLY, 0)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return fmt.Errorf("flock %s: %w", tmp, err)
	}

	facts, err := p.fill(ctx, v, tmp)
	if err != nil {
		return err
	}
	if err := lock.Sync(); err != nil { // the names in tmp
		return noRoom(err)
	}
	if err := os.Rename(tmp, p.path(volumesDir, v.ID)); err != nil {
		return noRoom(err)
	}
	if err := p.durable.sync(p.path(volumesDir)); err != nil {
		return errors.Join(err, p.remove(v.ID))
	}
	p.durable.known.Store(v.ID, true)
	p.cache.put(v.ID, facts)
	return nil
}

// fill makes the files of a volume in dir, durably but for their names, and returns its
// facts. It sets v.Fresh.
func (p *Pool) fill(ctx context.Context, v *Volume, dir string) (made cachedFacts, err error) {
	data, err := rawfile.Open(filepath.Join(dir, dataFile), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return made, noRoom(err)
	}
	defer func() { err = errors.Join(err, data.Close()) }()
	if err := keepInPlace(data); err != nil {
		return made, err
	}
	if err := p.extend(ctx, data, *v, v.Bytes); err != nil {
		return made, err
	}
	if v.Fresh, err = changedAt(data.Name()); err != nil {
		return made, err
	}
	facts, err := encode(*v, nil)
	if err != nil {
		return made, err
	}
	file, err := makeFacts(dir, facts)
	return cachedFacts{file, *v, facts}, noRoom(errors.Join(err, data.Sync()))
}

// keepInPlace has a btrfs write an empty file in place from now on. Otherwise it writes each
// block to a new place, for which there is none in a full pool, though a thick volume has
// all its blocks; and a block that changes while it is written gets a checksum that is wrong.
func keepInPlace(f *os.File) error {
	const compressed, noCopy = 0x4, 0x800000 // FS_COMPR_FL, FS_NOCOW_FL of linux/fs.h
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return &os.PathError{Op: "fstatfs", Path: f.Name(), Err: err}
	}
	if fs.Type != unix.BTRFS_SUPER_MAGIC {
		return nil
	}
	flags, err := unix.IoctlGetUint32(int(f.Fd()), unix.FS_IOC_GETFLAGS)
	flags &^= compressed
	for _, next := range []uint32{flags, flags | noCopy} { // not both at once
		if err == nil {
			err = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, int(next))
		}
	}
	return wrap(err, "have the btrfs write %s in place (chattr +C)", f.Name())
}
