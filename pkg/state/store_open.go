package state

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime/debug"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// ErrCorrupt is in the chain of every error that says: the file is no sound store.
var ErrCorrupt = errors.New("not a sound store")

// schemaVersion is raised when a field is added that a reader may want to know of.
const schemaVersion = "1"

var (
	metaBucket    = []byte("meta")
	recordsBucket = []byte("records")
	badBucket     = []byte("bad")
	versionKey    = []byte("version")
	bootKey       = []byte("boot")
)

// open takes the file, checks it and reads the records. A corrupt file is
// renamed while its lock is held, so that no other process meets it; the error
// is then ErrCorrupt, and s.setAside tells the new name.
func (s *Store) open(ctx context.Context, bootID string) error {
	f, dead, err := lockFile(ctx, s.path, false)
	if err != nil {
		return err
	}
	s.takenFrom = max(s.takenFrom, dead)
	db, err := openDB(f, false)
	if err == nil {
		err = guarded(func() error { return s.load(ctx, db, bootID) })
	}
	if err == nil {
		return s.take(db, f, bootID)
	}
	if errors.Is(err, ErrCorrupt) && s.setAside == "" {
		aside, renameErr := setAside(s.path)
		if renameErr != nil {
			err = fmt.Errorf("%v; setting it aside: %w", err, renameErr)
		}
		s.setAside = aside
	}
	return errors.Join(err, closeDB(db, f))
}

// take makes an open file the store's.
func (s *Store) take(db *bolt.DB, f *os.File, bootID string) error {
	s.db, s.file, s.owned, s.bootID = db, f, 0, bootID
	if err := s.measure(); err != nil {
		return errors.Join(err, closeDB(db, f))
	}
	return nil
}

// snapshot reads the records without changing the file.
func (s *Store) snapshot(ctx context.Context) (err error) {
	bootID, err := BootID()
	if err != nil {
		return err
	}
	wait, cancel := context.WithTimeout(ctx, readOnlyWait)
	defer cancel()
	f, _, err := lockFile(wait, s.path, true)
	if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
		return ErrLocked
	}
	if err != nil {
		return err
	}
	db, err := openDB(f, true)
	defer func() { err = errors.Join(err, closeDB(db, f)) }()
	if err != nil || db == nil {
		return err
	}
	c := newContents()
	if err := guarded(func() error { return db.View(c.read) }); err != nil {
		return err
	}
	c.logBad(ctx)
	if c.bootID == bootID {
		s.records = c.records
	}
	return nil
}

// openDB opens the locked file with bbolt, after checking that bbolt can bear
// it. The DB is nil if there is nothing in the file to read. Whatever is
// returned, the caller closes both with closeDB.
func openDB(f *os.File, readOnly bool) (db *bolt.DB, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() == 0 && readOnly {
		return nil, nil
	}
	if info.Size() > 0 {
		if err := checkPages(f, info.Size()); err != nil {
			return nil, err
		}
	}
	err = guarded(func() error {
		db, err = bolt.Open(f.Name(), 0o600, &bolt.Options{
			ReadOnly: readOnly,
			// bbolt locks this same open file once more, which takes no wait.
			OpenFile: func(string, int, os.FileMode) (*os.File, error) { return f, nil },
		})
		return err
	})
	return db, err
}

// closeDB closes the DB and the file; bbolt has closed the file already where
// it opened it, or tried to.
func closeDB(db *bolt.DB, f *os.File) error {
	var err error
	if db != nil {
		err = db.Close()
	}
	if closeErr := f.Close(); !errors.Is(closeErr, os.ErrClosed) {
		err = errors.Join(err, closeErr)
	}
	return err
}

// guarded turns a panic of f, and a fault in the memory that f maps, into
// ErrCorrupt. checkPages should leave bbolt no cause for either.
func guarded(f func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("%w: reading it fails: %v", ErrCorrupt, r)
		}
	}()
	return f()
}

// contents is what was read from a store.
type contents struct {
	fresh    bool // nothing was ever written
	bootID   string
	sequence uint64
	records  map[string]*Volume
	bad      map[string][]byte // records that cannot be read
	reasons  map[string]error  // why
}

func newContents() *contents {
	return &contents{records: map[string]*Volume{}, bad: map[string][]byte{}, reasons: map[string]error{}}
}

// read reads the whole store.
func (c *contents) read(tx *bolt.Tx) error {
	c.fresh = true
	root := tx.Cursor()
	for key, value := root.First(); key != nil; key, value = root.Next() {
		c.fresh = false
		if value != nil {
			return fmt.Errorf("%w: %q is no bucket", ErrCorrupt, key)
		}
	}
	if c.fresh {
		return nil
	}
	meta, records := tx.Bucket(metaBucket), tx.Bucket(recordsBucket)
	if meta == nil || records == nil {
		return fmt.Errorf("%w: its bucket meta or records is missing", ErrCorrupt)
	}
	bootID, err := unseal(meta.Get(bootKey))
	if err != nil {
		return fmt.Errorf("%w: its boot id: %v", ErrCorrupt, err)
	}
	c.bootID = string(bootID)
	if c.sequence = records.Sequence(); c.sequence > math.MaxInt64 {
		return fmt.Errorf("%w: its revision %d cannot be", ErrCorrupt, c.sequence)
	}
	return records.ForEach(func(key, value []byte) error {
		if value == nil {
			return fmt.Errorf("%w: there is a bucket %q among its records", ErrCorrupt, key)
		}
		id := string(key)
		v, err := decodeRecord(id, value)
		if err != nil {
			c.bad[id], c.reasons[id] = append([]byte{}, value...), err
			return nil
		}
		c.records[id] = v
		c.sequence = max(c.sequence, v.Revision)
		return nil
	})
}

func (c *contents) logBad(ctx context.Context) {
	for id, err := range c.reasons {
		klog.FromContext(ctx).Error(err, "Record cannot be read and counts as none (its bytes are kept in the bucket bad); mounts of the volume stay until they are unpublished", "volume", id)
	}
}

// load reads the store and brings it up to this boot.
func (s *Store) load(ctx context.Context, db *bolt.DB, bootID string) error {
	c := newContents()
	if err := db.View(c.read); err != nil {
		return err
	}
	c.logBad(ctx)
	if !c.fresh && c.bootID != bootID {
		klog.FromContext(ctx).Info("Records of an earlier boot are dropped: their mounts are gone", "store", s.path, "records", len(c.records)+len(c.bad))
		c.records = map[string]*Volume{}
	}
	s.records, s.revision = c.records, c.sequence
	switch {
	case c.fresh || c.bootID != bootID:
		return db.Update(func(tx *bolt.Tx) error { return begin(tx, bootID, c.sequence) })
	case len(c.bad) > 0:
		err := db.Update(func(tx *bolt.Tx) error { return moveBad(tx, c.bad) })
		if errors.Is(err, unix.ENOSPC) {
			klog.FromContext(ctx).Error(err, "Records that cannot be read stay where they are until the next start", "store", s.path)
			return nil
		}
		return err
	}
	return nil
}

// begin makes the buckets of an empty store.
func begin(tx *bolt.Tx, bootID string, sequence uint64) error {
	for _, name := range [][]byte{metaBucket, recordsBucket, badBucket} {
		if tx.Bucket(name) != nil {
			if err := tx.DeleteBucket(name); err != nil {
				return err
			}
		}
		if _, err := tx.CreateBucket(name); err != nil {
			return err
		}
	}
	if err := tx.Bucket(recordsBucket).SetSequence(sequence); err != nil {
		return err
	}
	meta := tx.Bucket(metaBucket)
	if err := meta.Put(versionKey, seal([]byte(schemaVersion))); err != nil {
		return err
	}
	return meta.Put(bootKey, seal([]byte(bootID)))
}

// moveBad moves records that cannot be read out of the way.
func moveBad(tx *bolt.Tx, bad map[string][]byte) error {
	to, err := tx.CreateBucketIfNotExists(badBucket)
	if err != nil {
		return err
	}
	for id, value := range bad {
		if err := to.Put([]byte(id), value); err != nil {
			return err
		}
		if err := tx.Bucket(recordsBucket).Delete([]byte(id)); err != nil {
			return err
		}
	}
	return nil
}
