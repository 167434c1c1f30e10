package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/durable"
)

// Delete deletes a volume with its data, if it is there. It does not check whether the
// data is in use: Backend does.
func (p *Pool) Delete(ctx context.Context, id string) error {
	if err := ValidateID(id); err != nil {
		return err
	}
	unlock, err := p.volumes.Lock(ctx, id)
	if err != nil {
		return fmt.Errorf("volume %s: delete: %w", id, err)
	}
	defer unlock()
	if err := p.Check(ctx); err != nil { // a pool that is away looks empty
		return fmt.Errorf("volume %s: delete: %w", id, err)
	}
	p.durable.known.Delete(id)
	return wrap(p.remove(id), "volume %s: delete", id)
}

// remove moves a volume to trash, durably, and then deletes it there, with what an
// earlier call could not delete. It needs no free space in the pool.
func (p *Pool) remove(id string) error {
	trash, err := p.emptyTrash(id)
	if err != nil {
		return err
	}
	place := p.path(volumesDir, id)
	if info, err := os.Lstat(place); err == nil && !info.IsDir() { // of a link only the link would go
		return fmt.Errorf("%s is no directory: see what it is, and remove it with its data", place)
	}
	switch err := unix.Rename(place, trash); {
	case errors.Is(err, unix.ENOENT): // perhaps an earlier call renamed it, and failed then
	case durable.LacksRoom(err): // the name would take one more block of trash
		return takeApart(place)
	case err != nil:
		return fmt.Errorf("rename %s to %s: %w", place, trash, err)
	}
	// The new name in trash need not be durable: if it is lost, the volume is gone all the same.
	if err := p.durable.sync(p.path(volumesDir)); err != nil {
		return err
	}
	return os.RemoveAll(trash)
}

// emptyTrash deletes what earlier deletions of a volume left, and returns the path to
// which the next one moves it.
func (p *Pool) emptyTrash(id string) (string, error) {
	entries, err := os.ReadDir(p.path(trashDir))
	if err != nil {
		return "", err
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), id+"~") { // older versions appended a number
			err = errors.Join(err, os.RemoveAll(p.path(trashDir, entry.Name())))
		}
	}
	return p.path(trashDir, id+"~"), err
}

// takeApart deletes a volume in its place, the data first. Until the facts are deleted too,
// the volume exists without data: it cannot be attached, but is still known, and the
// caller, who has no answer yet, asks again.
func takeApart(place string) error {
	if err := ignore(os.Remove(filepath.Join(place, dataFile)), os.ErrNotExist); err != nil {
		return err
	}
	if err := durable.SyncDir(place); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(place), durable.SyncDir(filepath.Dir(place)))
}
