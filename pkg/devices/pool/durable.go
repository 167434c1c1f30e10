package pool

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// The facts about a volume are padded to whole factsUnits, by at least factsSlack, so
// that later versions of them need no further blocks.
const (
	factsUnit  = 1024 // bytes; the smallest block of ext4 and xfs
	factsSlack = 256  // bytes
)

// pad appends spaces, which JSON allows.
func pad(facts []byte) []byte {
	size := (len(facts) + factsSlack + factsUnit - 1) / factsUnit * factsUnit
	return append(facts, bytes.Repeat([]byte{' '}, size-len(facts))...)
}

// makeFacts writes the facts of a new volume, and the slot for the next ones, in dir. It
// returns the file of the facts. They are durable then, their names are not. Of the slot only
// the blocks count: the disk is told to write it beside the facts, and a journal takes both,
// and what was done in dir before, in one go.
func makeFacts(dir string, facts []byte) (file fileState, err error) {
	slot, err := writeInPlace(filepath.Join(dir, slotFile), pad(facts))
	if err != nil {
		return file, err
	}
	err = unix.SyncFileRange(int(slot.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE)
	if err = errors.Join(err, slot.Close()); err != nil {
		return file, err
	}
	return overwrite(filepath.Join(dir, volumeFile), pad(facts))
}

// overwrite writes a file in place, durably, and into the blocks that it already has.
func overwrite(path string, contents []byte) (file fileState, err error) {
	f, err := writeInPlace(path, contents)
	if err != nil {
		return file, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if err := syncContents(f); err != nil {
		return file, err
	}
	return stateOf(f)
}

// syncContents makes the contents of a file durable. If the file had its size and blocks
// already, it syncs only the contents, so that it waits for no journal.
func syncContents(f *os.File) error {
	return wrap(rawfile.RetryErr(func() error { return unix.Fdatasync(int(f.Fd())) }), "fdatasync %s", f.Name())
}

// writeInPlace writes a file, which need not be there, and leaves it open.
func writeInPlace(path string, contents []byte) (*os.File, error) {
	f, err := rawfile.Open(path, os.O_WRONLY|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	_, err = f.WriteAt(contents, 0)
	if err == nil {
		err = cutTo(f, int64(len(contents)))
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// cutTo shortens a file that has more bytes. It does nothing to a file of the right size,
// because the kernel would journal even that.
func cutTo(f *os.File, bytes int64) error {
	info, err := f.Stat()
	if err != nil || info.Size() <= bytes {
		return err
	}
	return f.Truncate(bytes)
}

// exchange exchanges the names of a file and of another one that was written beside it, in
// one step: nothing is allocated, and the blocks of the other file stay for the
// next write. If the file system cannot do that, the other file is replaced.
func exchange(path, beside string) error {
	err := unix.Renameat2(unix.AT_FDCWD, beside, unix.AT_FDCWD, path, unix.RENAME_EXCHANGE)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP) {
		err = unix.Rename(beside, path)
	}
	if err != nil {
		return fmt.Errorf("exchange %s and %s: %w", beside, path, err)
	}
	return nil
}

// durability is what is known of volumes: whether what is seen of one survives a loss of power. A
// call that finds what it was to do may find what an earlier one did and could not sync.
type durability struct {
	turns keylock.Map // by volume id; held while names of a volume's files change and are synced
	// known is false for a volume of which a sync failed, true for one of which all is durable. Of
	// others it is not known: the process before may have been killed before it synced them.
	known sync.Map                // by volume id
	fail  func(path string) error // in tests
}

func (d *durability) sync(path string) error {
	if d.fail != nil {
		if err := d.fail(path); err != nil {
			return err
		}
	}
	return durable.SyncDir(path)
}

// failed reports whether what is seen of a volume was not synced, though it should have been.
func (d *durability) failed(id string) bool {
	durable, known := d.known.Load(id)
	return known && durable == false
}

// settle makes durable what is seen of a volume, unless that is known to be.
func (p *Pool) settle(ctx context.Context, id string) error {
	unlock, err := p.durable.turns.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: %w", id, err)
	}
	defer unlock()
	if durable, _ := p.durable.known.Load(id); durable == true {
		return nil
	}
	dir := p.path(volumesDir, id)
	for _, path := range []string{filepath.Join(dir, volumeFile), dir, p.path(volumesDir)} {
		if err := p.durable.sync(path); err != nil {
			return fmt.Errorf("volume %s: make durable what was done before: %w", id, err) // of no class: the volume is here, and no other node is to be asked
		}
	}
	p.durable.known.Store(id, true)
	return nil
}

// change makes a change of a volume's files, and syncs their directory.
func (p *Pool) change(ctx context.Context, id string, change func() error) error {
	unlock, err := p.durable.turns.Lock(ctx, id)
	if err != nil {
		return err
	}
	defer unlock()
	durable, _ := p.durable.known.Swap(id, nil)
	if err = change(); err == nil {
		err = p.durable.sync(p.path(volumesDir, id))
	}
	switch {
	case err != nil:
		p.durable.known.Store(id, false)
	case durable == true:
		p.durable.known.Store(id, true)
	default: // whether the volume's own name is durable is not known
		p.durable.known.Delete(id)
	}
	return err
}

const takesNoWrites = "its file system takes no writes: it was mounted read-only, or has met an error, which dmesg tells; repair it, and mount it for writing again"

// noRoom gives errors of a file system that is full, limited or read-only their class.
func noRoom(err error) error {
	switch {
	case durable.LacksRoom(err):
		return state.Errorf(state.ResourceExhausted, "the pool has no room; delete volumes or data, or enlarge the pool: %w", err)
	case errors.Is(err, unix.EROFS): // another node is asked then
		return state.Errorf(state.ResourceExhausted, "the pool has no room, as %s: %w", takesNoWrites, err)
	case errors.Is(err, unix.EFBIG):
		return state.Errorf(state.OutOfRange, "larger than a file can be in the pool: %w", err)
	case errors.Is(err, unix.EOPNOTSUPP):
		return state.Errorf(state.FailedPrecondition, "the pool's file system cannot allocate blocks ahead (fallocate), which thick volumes take: keep the pool on ext4 or xfs, or ask for thin volumes: %w", err)
	}
	return err
}

// ignore returns nil for an error that is expected.
func ignore(err, expected error) error {
	if errors.Is(err, expected) {
		return nil
	}
	return err
}

// wrap adds what was being done to an error, if there is one.
func wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}
