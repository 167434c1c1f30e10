package lvm

import (
	"errors"
	"os"
	"path/filepath"

	"github.com/csi-node/csi-node/pkg/internal/storagelock"
	"github.com/csi-node/csi-node/pkg/state"
)

// lockDir is where LVM has its own locks: whoever works on a group of the node shares it.
const lockDir = "/run/lock/lvm"

// lock keeps other plugins of the driver's name from a group for as long as this one
// runs. Unavailable: another one has it.
func (b *Backend) lock(group, uuid string) (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.observeOnly || b.locks[uuid] != nil {
		return nil
	}
	defer func() {
		if err != nil {
			err = state.Errorf(state.Unavailable, "lock the volume group %s: %w", group, err)
		}
	}()
	if err := os.MkdirAll(b.lockDir, 0o700); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(b.lockDir, "csi-node."+b.driver+"."+uuid), os.O_RDONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := storagelock.Take(f, b.stateDir, "give this one another --driver-name, or other --lvm-groups"); err != nil {
		return errors.Join(err, f.Close())
	}
	b.locks[uuid] = f
	return nil
}

// Close gives up the locks of the groups. The backend is not used any more.
func (b *Backend) Close() (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for uuid, f := range b.locks {
		err = errors.Join(err, f.Close())
		delete(b.locks, uuid)
	}
	return err
}
