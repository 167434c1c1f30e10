package pool

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/csi-node/csi-node/pkg/internal/storagelock"
)

// Lock keeps plugins with other state directories off the pool until unlock is
// called or the process has ended (package storagelock). The error names who has it.
func (p *Pool) Lock(stateDir string) (unlock func() error, err error) {
	// Not a file in the pool, which could not be unmounted then.
	f, err := p.openSeen()
	if err != nil {
		return nil, err
	}
	if err := storagelock.Take(f, stateDir, "give this one another --pool-dir"); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock the pool %s: %w", p.dir, err)
	}
	return f.Close, nil
}

// openSeen opens <dir>.uuid, by the directory that symbolic links lead to: those
// who use the pool by different links must meet.
func (p *Pool) openSeen() (*os.File, error) {
	dir, err := filepath.EvalSymlinks(p.dir)
	if err != nil { // the pool is away
		return os.Open(p.dir + seenSuffix)
	}
	f, err := os.Open(dir + seenSuffix)
	if !errors.Is(err, os.ErrNotExist) {
		return f, err
	}
	// Whole, and never in the place of one that another process has locked.
	fresh, err := os.CreateTemp(filepath.Dir(dir), filepath.Base(dir)+seenSuffix+"~")
	if err != nil {
		return nil, err
	}
	defer os.Remove(fresh.Name())
	_, err = fresh.WriteString(p.uuid + "\n")
	if err := errors.Join(err, fresh.Close()); err != nil {
		return nil, err
	}
	if err := ignore(os.Link(fresh.Name(), dir+seenSuffix), os.ErrExist); err != nil {
		return nil, err
	}
	return os.Open(dir + seenSuffix)
}
