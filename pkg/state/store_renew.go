package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	bolt "go.etcd.io/bbolt"
)

const (
	freshSuffix = ".new"
	// successorSuffix is of the copy by which a store is taken over.
	successorSuffix = ".successor"
	// renewTime bounds the wait for a file that nobody else knows of.
	renewTime = time.Second
)

// intact returns an error if the path does not name the store's file any more,
// or if the file has been cut: memory that maps it must not be touched then. If
// that cannot be told, the write will tell.
func (s *Store) intact() error {
	same, err := stillAt(s.file, s.path)
	if err != nil {
		return nil
	}
	info, err := s.file.Stat()
	switch {
	case err != nil:
		return nil
	case !same:
		return errors.New("the file is gone from its path")
	case info.Size() < s.size:
		return fmt.Errorf("the file was cut from %d bytes to %d", s.size, info.Size())
	}
	return nil
}

// measure remembers how large the file is and how much of it is in use.
func (s *Store) measure() error {
	info, err := s.file.Stat()
	if err != nil {
		return err
	}
	s.size = info.Size()
	return guarded(func() error {
		return s.db.View(func(tx *bolt.Tx) error { s.used = tx.Size(); return nil })
	})
}

// renew puts a new file with all records, the changes applied, into the place of
// the one that was lost. What stands there by now is set aside; if another
// process has it, that is an error. The lost file is not closed: bbolt would
// touch its memory.
func (s *Store) renew(changes map[string]change) (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), renewTime)
	defer cancel()
	fresh := s.path + freshSuffix
	if err := os.MkdirAll(filepath.Dir(s.path), 0o750); err != nil {
		return err
	}
	if err := os.Remove(fresh); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	f, _, err := lockFile(ctx, fresh, false)
	if err != nil {
		return err
	}
	db, err := openDB(f, false)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("making the store anew: %w", err), closeDB(db, f), os.Remove(fresh))
		}
	}()
	if err != nil {
		return err
	}
	err = db.Update(func(tx *bolt.Tx) error {
		if err := begin(tx, s.bootID, s.revision); err != nil {
			return err
		}
		all := map[string]change{}
		for id, v := range s.records {
			value, err := encodeRecord(v)
			if err != nil {
				return err
			}
			all[id] = change{v, value}
		}
		if err := put(tx, s.revision, all); err != nil {
			return err
		}
		return put(tx, s.revision, changes)
	})
	if err != nil {
		return err
	}
	if err := s.makeWay(); err != nil {
		return err
	}
	if err := os.Rename(fresh, s.path); err != nil {
		return err
	}
	return s.take(db, f, s.bootID)
}

// makeWay sets aside what stands at the store's path, unless another process
// uses it.
func (s *Store) makeWay() error {
	same, err := stillAt(s.file, s.path)
	if err != nil {
		return err
	}
	if _, err := os.Lstat(s.path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if !same {
		ctx, cancel := context.WithTimeout(context.Background(), renewTime)
		defer cancel()
		other, _, err := lockFile(ctx, s.path, true)
		if err != nil {
			return fmt.Errorf("another process has begun a store there: stop one of the two: %w", err)
		}
		defer other.Close() // only locked
	}
	_, err = setAside(s.path)
	return err
}
