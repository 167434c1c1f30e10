package mounts

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/state"
)

// sourceDeadline is that of a source which names none. The volume's worker waits for the mount.
const sourceDeadline = 2 * time.Minute

// MountSource mounts a file system that is on no block device at a path, which it
// makes if need be. It ends with ctx, or with the source's deadline: a mount that
// comes back later is taken away again, and until then there is no other for the path.
func (h *Host) MountSource(ctx context.Context, source state.Source, path string, flags state.Flags) error {
	return h.mountSource(ctx, source, path, flags, create)
}

func (h *Host) mountSource(ctx context.Context, source state.Source, path string, flags state.Flags, mode createMode) (err error) {
	defer state.Wrap(&err, "mount %s of %s at %s", source.FSType, source.Source, path)
	ctx, cancel := context.WithTimeout(ctx, cmp.Or(source.Deadline, sourceDeadline))
	defer cancel()
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := h.Check(path); err != nil {
		return err
	}
	var mu sync.Mutex
	mnt, late := -1, false
	_, err = answered(h.mounting.Do(ctx, path, hang.NoLimit, func() (struct{}, error) {
		fd, err := newSource(source, flags)
		mu.Lock()
		defer mu.Unlock()
		if late && err == nil {
			unix.Close(fd) // unmounts it
		} else if err == nil {
			mnt = fd
		}
		return struct{}{}, err
	}))
	defer func() {
		mu.Lock()
		defer mu.Unlock()
		if late = true; mnt >= 0 {
			unix.Close(mnt) // unmounts it, unless it was attached
		}
	}()
	if err != nil {
		return err
	}
	p, err := h.openFor(path, mode)
	if err != nil {
		return err
	}
	defer p.close()
	return h.attach(p, mnt, state.Directory, mode)
}

// newSource returns a new mount that is not attached yet.
func newSource(source state.Source, flags state.Flags) (int, error) {
	fs, err := unix.Fsopen(source.FSType, unix.FSOPEN_CLOEXEC)
	switch {
	case err == unix.ENODEV:
		return -1, state.Errorf(state.FailedPrecondition, "this node's kernel has no file system %q: load its module", source.FSType)
	case err != nil:
		return -1, fmt.Errorf("fsopen: %w", err)
	}
	defer unix.Close(fs)
	if err := unix.FsconfigSetString(fs, "source", source.Source); err != nil {
		return -1, fmt.Errorf("set the source: %w", withMessages(err, contextMessages(fs)))
	}
	log := filesystem.OpenKernelLog()
	defer log.Close()
	for _, option := range append(source.Options[:len(source.Options):len(source.Options)], flags.Super...) {
		if err := setOption(fs, option); err != nil {
			return -1, optionError(err, contextMessages(fs), log.About(source.FSType, source.Source), option)
		}
	}
	if err := unix.FsconfigCreate(fs); err != nil {
		return -1, createError(err, contextMessages(fs), log.About(source.FSType, source.Source), flags.Super)
	}
	mnt, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, int(flags.Set))
	if err != nil {
		return -1, fmt.Errorf("fsmount with attributes %q: %w", flags.Set, withMessages(err, contextMessages(fs)))
	}
	return mnt, nil
}
