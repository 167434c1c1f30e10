// Package store keeps the desired state of a node's volumes, so that no crash
// forgets it: one file a volume, in a directory on a tmpfs.
//
//	<state directory>
//	├── intents.db        locked, and empty, see legacyPath
//	└── volumes           locked by the plugin that has it
//	    ├── <hash>.json   the record of the volume whose id has that SHA-256
//	    └── spare         blocks and an inode for removals on a full file system
//
// A file is a JSON object, a state.Volume with the boot id of the kernel, whose
// last member is the CRC-32C of all before it: a path with a flipped bit is a
// wrong mount. One that is damaged costs one volume its record. Memory is what is
// served, and the directory what the next process begins with: a file is written
// beside and renamed, and nothing is synced, because intents end with the mounts
// that they describe, at a reboot.
//
// The schema is additive: fields that a newer version wrote are kept.
package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/boot"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/state"
)

// Directory is the name of the store in the state directory.
const Directory = "volumes"

// ErrLocked is what OpenReadOnly returns while a running plugin has the store.
var ErrLocked = errors.New("the store is in use by a running csi-node: ask that process, or try again when it has ended")

// readOnlyWait bounds the wait of OpenReadOnly for the store's lock.
const readOnlyWait = time.Second

// Store keeps the desired state of this node's volumes. Reading is from memory;
// every edit is in the file system before it is seen. Its methods may be called
// concurrently.
type Store struct {
	path      string // of the directory
	bootID    string
	setAside  []string
	takenFrom int
	revision  atomic.Uint64 // the last one given out

	edits keylock.Map // by id; held through an edit

	mu        sync.RWMutex             // held shortly; guards all up to the next blank line
	volumes   map[string]*state.Volume // the records; none is changed in place
	places    *places                  // of all records, and of what is being written
	shown     map[state.DeviceNumber][]string
	unwritten map[string]bool // ids of records that changed in memory alone

	disk   sync.RWMutex // held for reading while a record is written and shown; guards the next two
	dir    *directory   // nil when closed, or opened for reading
	legacy *os.File     // intents.db, locked

	closed atomic.Bool
	later  *time.Timer // for what is unwritten; nil when opened for reading
}

// Open opens the store in a state directory, and makes both (mode 0750 and 0700)
// if they are not there. The caller is its only user until Close: while another
// process has it, Open waits until ctx ends, or until that process is dead
// (process.Dead): killed, and kept by a thread that hangs in the kernel. Such a
// one is taken over. Where the other process is not seen, in another PID
// namespace, Open waits. A version that keeps its records in intents.db is another
// process, too, and what it left there counts, and is taken in.
//
// Records that were written under another boot id are dropped, because the
// mounts that they speak of are gone. One that cannot be read is set aside (see
// SetAside) and logged. An error is returned for what a human must mend: a file
// in the way, missing permission, a state directory on an overlay, which goes with
// the container. A store opens without any space.
func Open(ctx context.Context, stateDir, bootID string) (*Store, error) {
	return opener{deadHolder}.open(ctx, stateDir, bootID)
}

func (o opener) open(ctx context.Context, stateDir, bootID string) (_ *Store, err error) {
	s := newStore(stateDir, bootID)
	defer func() {
		if err != nil {
			err = fmt.Errorf("store %s: %w", s.path, errors.Join(err, s.letGo()))
		}
	}()
	if err := os.MkdirAll(stateDir, 0o750); err != nil {
		return nil, err
	}
	if err := checkPlace(ctx, stateDir); err != nil {
		return nil, err
	}
	dir, err := s.lock(ctx, o, unix.LOCK_EX)
	if err != nil {
		return nil, err
	}
	if s.dir, err = openDirectory(s.path, dir); err != nil {
		return nil, err
	}
	if err := s.load(ctx); err != nil {
		return nil, err
	}
	s.dir.short = true
	if err := s.dir.refill(); err != nil {
		klog.FromContext(ctx).Error(err, "There is no room beside the store: nothing new can be set up; removals go on", "store", s.path)
	}
	s.later = time.AfterFunc(time.Hour, s.rewriteLater)
	s.later.Reset(rewriteEvery) // now that it is known
	return s, nil
}

// OpenReadOnly reads the store in a state directory into memory and lets go of
// it: it waits for a lock for at most a second (then ErrLocked), keeps none, and
// changes nothing. Where there is no store it is empty. Records of an earlier boot
// are left out; records that cannot be read are left out and logged. There is
// nothing to Edit in it.
func OpenReadOnly(ctx context.Context, stateDir string) (*Store, error) {
	bootID, err := boot.ID()
	if err != nil {
		return nil, err
	}
	s := newStore(stateDir, bootID)
	wait, cancel := context.WithTimeout(ctx, readOnlyWait)
	defer cancel()
	dir, err := s.lock(wait, opener{deadHolder}, unix.LOCK_SH)
	defer func() { _, _ = dir.Close(), s.legacy.Close() }() // only read from, if they are there
	var c *contents
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		err = ErrLocked
	case err == nil || errors.Is(err, os.ErrNotExist):
		_, c, _, err = s.look(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", s.path, err)
	}
	s.take(c.records)
	return s, nil
}

// lock locks intents.db and the directory, in this order: who has the second is
// alone with the first, see takeOver. What is only read need not be there.
func (s *Store) lock(ctx context.Context, o opener, how int) (dir *os.File, err error) {
	s.legacy, s.takenFrom, err = o.lockLegacy(ctx, legacyPath(filepath.Dir(s.path)), how)
	if err == nil || how == unix.LOCK_SH && errors.Is(err, os.ErrNotExist) {
		dead := 0
		dir, dead, err = o.lockDirectory(ctx, s.path, how)
		s.takenFrom = max(s.takenFrom, dead)
	}
	return dir, err
}

// look reads what is there. own is in the directory, and counts unless an older
// version has written intents.db since; the damage is that of intents.db, whose
// records count as none then.
func (s *Store) look(ctx context.Context) (own, counts *contents, damage, err error) {
	if own, err = read(s.path, s.bootID); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, nil, err
	}
	if s.legacy != nil {
		if counts, damage, err = readLegacy(s.legacy, s.bootID); err != nil {
			return nil, nil, nil, err
		}
	}
	if damage != nil {
		klog.FromContext(ctx).Error(damage, "The store of an older version cannot be read, and counts as empty; mounts without a record stay until they are unpublished", "file", s.legacy.Name())
		counts = newContents()
	} else if counts == nil {
		counts = own
	}
	for name, err := range counts.bad {
		klog.FromContext(ctx).Error(err, "Record cannot be read and counts as none; mounts of its volume stay until they are unpublished", "store", s.path, "record", name)
	}
	return own, counts, damage, nil
}

// load takes the records in, and brings the directory up to this boot.
func (s *Store) load(ctx context.Context) error {
	log := klog.FromContext(ctx)
	own, c, damage, err := s.look(ctx)
	if err != nil {
		return err
	}
	if err := removeSuccessors(s.path); err != nil {
		return err
	}
	for name := range own.bad {
		aside, err := setAside(filepath.Join(s.path, name))
		if err != nil {
			log.Error(err, "Record that cannot be read stays where it is until the next start", "store", s.path, "record", name)
			continue
		}
		s.setAside = append(s.setAside, aside)
		log.Info("Record was set aside", "file", aside)
	}
	for _, name := range own.old {
		if err := s.dir.remove(name); err != nil {
			return err
		}
	}
	if len(own.old) > 0 {
		log.Info("Records of an earlier boot are dropped: their mounts are gone", "store", s.path, "files", len(own.old))
	}
	s.revision.Store(max(own.revision, c.revision))
	s.take(c.records)
	if c == own {
		return s.legacy.Truncate(0)
	}
	return s.takeIn(ctx, own, c, damage)
}

func newStore(stateDir, bootID string) *Store {
	s := &Store{path: filepath.Join(stateDir, Directory), bootID: bootID, unwritten: map[string]bool{}}
	s.take(map[string]*state.Volume{})
	return s
}

// take makes records those that are served.
func (s *Store) take(records map[string]*state.Volume) {
	s.volumes, s.places, s.shown = records, newPlaces(), map[state.DeviceNumber][]string{}
	for _, v := range records {
		s.places.claim(nil, v)
		s.show(nil, v)
	}
}

// show keeps the index of device numbers.
func (s *Store) show(before, after *state.Volume) {
	for _, number := range numbersOf(before) {
		s.shown[number] = slices.DeleteFunc(s.shown[number], func(id string) bool { return id == before.ID })
		if len(s.shown[number]) == 0 {
			delete(s.shown, number)
		}
	}
	for _, number := range numbersOf(after) {
		s.shown[number] = append(s.shown[number], after.ID)
	}
}

func numbersOf(v *state.Volume) (all []state.DeviceNumber) {
	if v != nil {
		for _, t := range v.Targets {
			if t.Device != (state.DeviceNumber{}) {
				all = append(all, t.Device)
			}
		}
	}
	return all
}

// checkPlace refuses a state directory that does not outlive the container, and
// tells of one that outlives the boot.
func checkPlace(ctx context.Context, dir string) error {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return fmt.Errorf("statfs %s: %w", dir, err)
	}
	switch uint32(fs.Type) {
	case unix.TMPFS_MAGIC, unix.RAMFS_MAGIC:
	case unix.OVERLAYFS_SUPER_MAGIC:
		return fmt.Errorf("the state directory %s is on an overlay file system, which goes with the container, and the mounts stay: give the plugin a directory of the node's tmpfs (/run)", dir)
	default:
		klog.FromContext(ctx).Info("The state directory is on no tmpfs: intents should go with the mounts at a reboot, and editing them is slower on a disk", "directory", dir)
	}
	return nil
}

// Get returns a copy of the volume's record, nil when there is none.
func (s *Store) Get(id string) *state.Volume {
	record := s.record(id)
	if record == nil {
		return nil
	}
	return record.Stored()
}

// record returns the record that is served.
func (s *Store) record(id string) *state.Volume {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.volumes[id]
}

// List returns copies of all records in the order of their ids.
func (s *Store) List() []*state.Volume {
	list := slices.SortedFunc(maps.Values(s.records()), func(a, b *state.Volume) int { return cmp.Compare(a.ID, b.ID) })
	for i, v := range list {
		list[i] = v.Stored()
	}
	return list
}

// records returns the records that are served.
func (s *Store) records() map[string]*state.Volume {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.volumes)
}

// ShownAs returns the id of the volume that is published as a device number, be
// it on its way out; empty when there is none.
func (s *Store) ShownAs(number state.DeviceNumber) string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if ids := s.shown[number]; len(ids) > 0 {
		return ids[0]
	}
	return ""
}

// SetAside returns where Open put files that hold no sound record.
func (s *Store) SetAside() []string { return s.setAside }

// TakenFrom returns the id of the process that Open took the store over from;
// 0 when there was none.
func (s *Store) TakenFrom() int { return s.takenFrom }

// Close ends the store once the edits under way have ended, and releases its
// locks. Edits that come later fail. It may be called more than once.
func (s *Store) Close() error {
	if s.later == nil { // opened for reading
		return nil
	}
	s.closed.Store(true)
	s.later.Stop()
	err := s.rewrite()
	s.disk.Lock()
	defer s.disk.Unlock()
	return errors.Join(err, s.letGo())
}

// letGo gives up the locks.
func (s *Store) letGo() (err error) {
	if s.dir != nil {
		err = s.dir.close()
	}
	if s.legacy != nil {
		err = errors.Join(err, s.legacy.Close())
	}
	s.dir, s.legacy = nil, nil
	return err
}
