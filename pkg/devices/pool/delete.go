package pool

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Delete deletes a volume with its data; one that is not there is deleted
// already. It does not look whether the data is in use: package loop does.
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
	return wrap(p.remove(id), "volume %s: delete", id)
}

// remove moves a volume to trash, durably, and then takes it apart, with what
// an earlier call could not take apart.
func (p *Pool) remove(id string) error {
	trash, err := os.MkdirTemp(p.path(trashDir), id+"~")
	if err != nil {
		return err
	}
	// A directory may be renamed over an empty one, see rename(2); os.Rename
	// refuses that.
	if err := ignore(unix.Rename(p.path(volumesDir, id), trash), unix.ENOENT); err != nil {
		return errors.Join(fmt.Errorf("rename %s to %s: %w", p.path(volumesDir, id), trash, err), os.Remove(trash))
	}
	for _, name := range []string{volumesDir, trashDir} {
		if err := syncDir(p.path(name)); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(p.path(trashDir))
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), id+"~") {
			err = errors.Join(err, os.RemoveAll(p.path(trashDir, entry.Name())))
		}
	}
	return err
}
