package state

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	"k8s.io/klog/v2"
)

// ErrLocked is what OpenReadOnly returns while a running plugin has the store.
var ErrLocked = errors.New("the store is in use by a running csi-node: ask that process, or try again when it has ended")

// readOnlyWait bounds the wait of OpenReadOnly for the store's lock.
const readOnlyWait = time.Second

// Store keeps the desired state of this node's volumes. Reading is from memory;
// every edit is on disk before it is seen. Its methods may be called concurrently.
type Store struct {
	path      string
	setAside  string
	takenFrom int

	// The committer's alone, once it runs.
	db     *bolt.DB
	file   *os.File // of db
	size   int64    // of file, in bytes, after the last commit
	used   int64    // of size, in bytes, from the start
	owned  int64    // so many bytes of file have their blocks, see room
	bootID string
	places *places // of records, and of what is being committed; nil until the first edit
	// unwritten holds the ids of records that changed in memory alone, see keep.
	unwritten map[string]bool

	// The committer alone writes these two, and reads them without the lock.
	revision uint64 // the last one given out
	records  map[string]*Volume
	mu       sync.RWMutex // guards records

	requests chan *request
	closing  chan struct{}
	once     sync.Once // closes closing
	stopped  chan struct{}
	closeErr error // of db; set before stopped is closed
}

// Open opens the store at path, and makes it (mode 0600, its directory 0750) if
// there is none. The caller is its only user until Close: while another process
// has it, Open waits until ctx ends, or until that process is dead (process.Dead):
// killed, and kept by a thread that hangs in the kernel. Such a one is taken over.
// Where the other process is not seen, in another PID namespace, Open waits.
//
// Records that were written under another boot id are dropped, because the
// mounts that they speak of are gone. A file that is not a sound store is
// renamed (see SetAside) and an empty store is begun; a single record that
// cannot be read is put aside inside the store. Both are logged as errors. An
// error is returned for what a human must mend: a directory in the way, missing
// permission, no space for a new store, a failing disk. A store that is there opens
// without any space.
func Open(ctx context.Context, path, bootID string) (*Store, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return nil, fmt.Errorf("store %s: making its directory: %w", path, err)
	}
	s := &Store{
		path:      path,
		unwritten: map[string]bool{},
		requests:  make(chan *request),
		closing:   make(chan struct{}),
		stopped:   make(chan struct{}),
	}
	err := s.open(ctx, bootID)
	if errors.Is(err, ErrCorrupt) && s.setAside != "" {
		klog.FromContext(ctx).Error(err, "Store was set aside and begun anew; mounts without a record stay until they are unpublished", "store", path, "setAside", s.setAside)
		err = s.open(ctx, bootID)
	}
	if err != nil {
		return nil, fmt.Errorf("store %s: %w", path, err)
	}
	if err := s.room(0); err != nil {
		klog.FromContext(ctx).Error(err, "There is no room beside the store: nothing new can be set up; removals go on", "store", path)
	}
	go s.commitAll()
	return s, nil
}

// OpenReadOnly reads the store at path into memory and lets go of the file: it
// waits for a lock for at most a second (then ErrLocked), keeps none, and
// changes nothing. Records of an earlier boot are left out; records that cannot
// be read are left out and logged. There is nothing to Edit in it.
func OpenReadOnly(ctx context.Context, path string) (*Store, error) {
	s := &Store{path: path}
	if err := s.snapshot(ctx); err != nil {
		return nil, fmt.Errorf("store %s: %w", path, err)
	}
	return s, nil
}

// BootID returns the id of this boot of the kernel: random(4), boot_id.
func BootID() (string, error) {
	const path = "/proc/sys/kernel/random/boot_id"
	id, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("reading the kernel's boot id: %w", err)
	}
	return strings.TrimSpace(string(id)), nil
}

// Get returns a copy of the volume's record, nil when there is none.
func (s *Store) Get(id string) *Volume {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if v := s.records[id]; v != nil {
		return deepCopy(v)
	}
	return nil
}

// List returns copies of all records in the order of their ids.
func (s *Store) List() []*Volume {
	s.mu.RLock()
	defer s.mu.RUnlock()
	list := make([]*Volume, 0, len(s.records))
	for _, v := range s.records {
		list = append(list, deepCopy(v))
	}
	slices.SortFunc(list, func(a, b *Volume) int { return cmp.Compare(a.ID, b.ID) })
	return list
}

// ShownAs returns the id of the volume that is published as a device number, be
// it on its way out; empty when there is none.
func (s *Store) ShownAs(number DeviceNumber) string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	for id, v := range s.records {
		for _, t := range v.Targets {
			if t.Device == number {
				return id
			}
		}
	}
	return ""
}

// SetAside returns where Open put a file that was no sound store; empty when
// there was none.
func (s *Store) SetAside() string { return s.setAside }

// TakenFrom returns the id of the process that Open took the store over from;
// 0 when there was none.
func (s *Store) TakenFrom() int { return s.takenFrom }

// Close ends the store once the commit under way has ended, and releases its
// lock. Edits that come later fail. It may be called more than once.
func (s *Store) Close() error {
	if s.closing == nil { // opened for reading
		return nil
	}
	s.once.Do(func() { close(s.closing) })
	<-s.stopped
	return s.closeErr
}

// deepCopy returns a copy as the store would read it back: without the marks
// that are never stored.
func deepCopy(v *Volume) *Volume {
	c := v.Clone()
	for _, part := range c.Parts() {
		c.Intent(part).Asked = false
		c.Latest(part).Asked = false
	}
	return c
}
