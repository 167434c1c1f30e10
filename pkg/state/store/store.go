// Package store keeps the desired state of a node's volumes, so that no crash
// forgets it: one file a volume, in a directory on a tmpfs.
//
//	<state directory>
//	├── intents.db            locked by the plugin that has the store; empty, see lockName
//	└── volumes
//	    ├── <hash>.json       the record of the volume whose id has that SHA-256
//	    ├── <hash>.json.new   its spare file, which the next write goes to; the two exchange names then
//	    └── <hash>.json.corrupt-<time>   a record that could not be read, set aside
//
// A file is a JSON object: a state.Volume and the boot id of the kernel. Its last member
// is the CRC-32C of all before it: a path with a flipped bit would be a wrong mount. A
// damaged file costs one volume its record: its mounts are adopted then. Records are served from memory; the directory
// is what the next process begins with. Nothing is synced to disk, because intents end at
// a reboot, with the mounts that they describe.
//
// The schema is additive: fields that a newer version wrote are kept.
//
// Read first: record.go (a file), then edit.go, directory.go and places.go. legacy.go is only
// for the intents.db of earlier versions.
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

// ErrLocked is what OpenReadOnly returns while a plugin has the store, which its reader has asked in vain.
var ErrLocked = errors.New("a plugin has the store and does not answer: it starts or ends, so try again soon; else its log says why")

// readOnlyWait bounds the wait of OpenReadOnly for the store's lock.
const readOnlyWait = time.Second

// Store keeps the desired state of this node's volumes. Reading is from memory;
// every edit but a proposal is in the file system before it is seen. Its methods may be called
// concurrently.
type Store struct {
	path      string // of the directory
	bootID    string
	takenFrom atomic.Int64
	revision  atomic.Uint64 // the last one given out

	edits keylock.Map // by id; held through an edit

	mu       sync.RWMutex                    // held briefly; guards the fields up to the next blank line
	volumes  map[string]*state.Volume        // the records by id; none is changed in place
	places   *places                         // of all records, and of what is being written
	byDevice map[state.DeviceNumber][]string // ids
	proposed map[string]*state.Volume        // by id, of records with changes that are not written: what they were before them

	disk sync.RWMutex // held for reading while a record is written and shown; guards the next two
	dir  *directory   // nil when closed, or opened for reading
	lock *held        // see lockName

	dead func(lock *os.File) (holder int, err error) // deadHolder, but for tests
}

// Open opens the store in a state directory, and makes both (mode 0750 and 0700)
// if they are not there. The caller is its only user until Close: while another
// process has it, Open waits until ctx ends, or until that process is dead
// (process.Dead): killed, and kept by a thread that hangs in the kernel. From such
// a process the store is taken over. Where the other process is not seen, in another PID
// namespace, Open waits. A version that keeps its records in intents.db is another
// process, too, and what it left there counts, and is taken in.
//
// Records that were written under another boot id are dropped, because the
// mounts that they speak of are gone. One that is damaged is set aside, with a
// name of its own, and logged. An error is returned if a file cannot be read, as it may be
// sound, and for what a human must mend: a file in the way, missing permission, a
// state directory on an overlay, which goes with the container. A store opens without any
// space.
func Open(ctx context.Context, stateDir, bootID string) (*Store, error) {
	s := newStore(stateDir, bootID)
	if err := s.open(ctx); err != nil {
		return nil, fmt.Errorf("store %s: %w", s.path, errors.Join(err, s.Close()))
	}
	return s, nil
}

func (s *Store) open(ctx context.Context) (err error) {
	stateDir := filepath.Dir(s.path)
	if err := os.MkdirAll(stateDir, 0o750); err != nil {
		return err
	}
	if err := checkPlace(ctx, stateDir); err != nil {
		return err
	}
	if s.lock, err = s.acquire(ctx, unix.LOCK_EX); err != nil {
		return err
	}
	if s.dir, err = openDirectory(s.path, s.bootID); err != nil {
		return err
	}
	return s.load(ctx)
}

// OpenReadOnly reads the store in a state directory into memory and lets go of
// it: it waits for a lock for at most a second (then ErrLocked), keeps none, and
// changes nothing. Where there is no store it is empty. Records of an earlier boot
// are left out; damaged ones are left out and logged. There is
// nothing to Edit in it.
func OpenReadOnly(ctx context.Context, stateDir string) (*Store, error) {
	bootID, err := boot.ID()
	if err != nil {
		return nil, err
	}
	s := newStore(stateDir, bootID)
	wait, cancel := context.WithTimeout(ctx, readOnlyWait)
	defer cancel()
	s.lock, err = s.acquire(wait, unix.LOCK_SH)
	defer func() { _ = s.Close() }() // only read from, if it is there
	var c *contents
	switch {
	case errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil:
		err = ErrLocked
	case err == nil || errors.Is(err, os.ErrNotExist):
		_, c, err = s.readAll(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", s.path, err)
	}
	s.serve(c.records)
	return s, nil
}

// readAll reads all records. own are those of the directory, counts those that are to
// be served: the same, unless an older version has written intents.db since.
func (s *Store) readAll(ctx context.Context) (own, counts *contents, err error) {
	if own, err = read(s.path, s.bootID); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, nil, err
	}
	if s.lock != nil {
		if counts, err = readLegacy(s.lock, s.bootID); err != nil {
			return nil, nil, err
		}
	}
	counts = cmp.Or(counts, own)
	for id := range own.records {
		if counts.records[id] == nil {
			own.old = append(own.old, fileName(id))
		}
	}
	for name, err := range counts.bad {
		klog.FromContext(ctx).Error(err, "Record is damaged and counts as none; mounts of its volume stay until they are unpublished", "store", s.path, "record", name)
	}
	return own, counts, nil
}

// load reads the records, and removes from the directory what does not count, or sets
// it aside.
func (s *Store) load(ctx context.Context) error {
	log := klog.FromContext(ctx)
	own, c, err := s.readAll(ctx)
	if err != nil {
		return err
	}
	if err := removeSuccessors(s.path); err != nil {
		return err
	}
	for name := range own.bad {
		path := filepath.Join(s.path, name)
		aside := asideName(path)
		if err := os.Rename(path, aside); err != nil {
			log.Error(err, "Damaged record stays where it is until the next start", "store", s.path, "record", name)
			continue
		}
		log.Info("Record was set aside", "file", aside)
	}
	for _, name := range own.old {
		if err := s.dir.remove(name); err != nil {
			return err
		}
	}
	if len(own.old) > 0 {
		log.Info("Records of an earlier boot, and files that nobody needs, are dropped", "store", s.path, "files", len(own.old))
	}
	s.revision.Store(max(own.revision, c.revision))
	s.serve(c.records)
	if c != own {
		if err := s.importLegacy(ctx, c); err != nil {
			return err
		}
	}
	if err := s.lock.Truncate(0); err != nil {
		return err
	}
	for _, v := range c.records { // after a takeover, an import or a kill there may be none yet
		err = errors.Join(err, s.dir.reserveBoth(v))
	}
	if err != nil {
		log.Error(err, "No blocks can be reserved for the records: removals may have to wait until there is room", "store", s.path)
	}
	return nil
}

func newStore(stateDir, bootID string) *Store {
	s := &Store{path: filepath.Join(stateDir, Directory), bootID: bootID, dead: deadHolder}
	s.serve(map[string]*state.Volume{})
	return s
}

// serve replaces the records in memory, and their indexes.
func (s *Store) serve(records map[string]*state.Volume) {
	s.volumes, s.byDevice, s.proposed = records, map[state.DeviceNumber][]string{}, map[string]*state.Volume{}
	s.places = &places{at: map[string][]occupant{}, below: map[string]int{}}
	for _, v := range records {
		s.places.add(occupants(v))
		s.indexDevices(&state.Volume{}, v)
	}
}

// RewritePaths replaces every path of every record by what rewrite returns for it,
// in memory: the disk follows with the next edit of a record. It serves records of
// versions that kept paths as they were asked. Of two targets that turn out to have
// the same path the one counts that was asked for last. It must be called before
// the first Edit.
func (s *Store) RewritePaths(rewrite func(path string) string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	records := map[string]*state.Volume{}
	for id, v := range s.volumes {
		v = v.Clone() // no record is changed in place
		for stage := v.Stage; stage != nil; stage = stage.Next {
			stage.Path = rewrite(stage.Path)
			if stage.Inline != nil {
				stage.Inline.Target = rewrite(stage.Inline.Target)
			}
		}
		targets := v.Targets
		v.Targets = map[string]*state.Target{}
		for _, target := range targets {
			for t := target; t != nil; t = t.Next {
				t.Path = rewrite(t.Path)
			}
			if other := v.Targets[target.Path]; other == nil || other.Revision < target.Revision {
				v.Targets[target.Path] = target
			}
		}
		records[id] = v
	}
	s.serve(records)
}

// indexDevices keeps the index of device numbers.
func (s *Store) indexDevices(before, after *state.Volume) {
	for _, t := range before.Targets {
		s.byDevice[t.Device] = slices.DeleteFunc(s.byDevice[t.Device], func(id string) bool { return id == before.ID })
		if len(s.byDevice[t.Device]) == 0 {
			delete(s.byDevice, t.Device)
		}
	}
	for _, t := range after.Targets {
		s.byDevice[t.Device] = append(s.byDevice[t.Device], after.ID)
	}
	delete(s.byDevice, state.DeviceNumber{}) // of targets that show none
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

// Get returns the volume's record, nil when there is none. It is the one that everybody
// gets, and must not be changed: Edit puts another one in its place.
func (s *Store) Get(id string) *state.Volume {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.volumes[id]
}

// IsAt reports whether a stage or a target of the volume has the path, be it on its way out.
func (s *Store) IsAt(id, path string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.ContainsFunc(s.places.at[path], func(o occupant) bool { return o.volume == id })
}

// List returns all records, as Get does, in the order of their ids.
func (s *Store) List() []*state.Volume {
	return slices.SortedFunc(maps.Values(s.records()), func(a, b *state.Volume) int { return cmp.Compare(a.ID, b.ID) })
}

// records returns the records that are served.
func (s *Store) records() map[string]*state.Volume {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return maps.Clone(s.volumes)
}

// VolumeOfDevice returns the id of the volume that is published as a device number, be
// it on its way out; empty when there is none.
func (s *Store) VolumeOfDevice(number state.DeviceNumber) string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if ids := s.byDevice[number]; len(ids) > 0 {
		return ids[0]
	}
	return ""
}

// VolumesAt returns the ids of the volumes that have a stage or a target at a path or
// below it, be it on its way out. Where there is none below, its cost does not depend
// on the number of volumes.
func (s *Store) VolumesAt(path string) []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	var ids []string
	for _, o := range s.places.within(path) {
		if !slices.Contains(ids, o.volume) {
			ids = append(ids, o.volume)
		}
	}
	return ids
}

// TakenFrom returns the id of the process that Open took the store over from;
// 0 when there was none.
func (s *Store) TakenFrom() int { return int(s.takenFrom.Load()) }

// Close ends the store once the edits under way have ended, and releases its
// lock. Nothing is changed any more then: an edit that would is an error. It may be
// called more than once.
func (s *Store) Close() (err error) {
	s.disk.Lock()
	defer s.disk.Unlock()
	if s.dir != nil {
		err = s.dir.close()
	}
	if s.lock != nil {
		err = errors.Join(err, s.lock.Close())
	}
	s.dir, s.lock = nil, nil
	return err
}
