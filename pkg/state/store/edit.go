package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/durable"
	"github.com/csi-node/csi-node/pkg/state"
)

// maxIDBytes bounds a volume id; CSI spec v1.13 allows 128 bytes in a string
// without its own limit.
const maxIDBytes = 1024

// recreateTime bounds the wait for a lock that nobody else should have.
const recreateTime = time.Second

var errClosed = errors.New("the store is closed, because the plugin is stopping, or was opened only for reading")

// Edit puts a changed record in the place of a volume's record, and returns it as Get does.
// The change is in the file system when Edit returns, and nobody sees it before.
//
// edit is called once, with a copy of the record (a fresh one with only ID and
// Revision, and Targets not nil, if there is none). Its Revision is the one that
// this edit will commit. Revisions rise, with gaps: a new process begins above the
// highest of the records that it finds. If edit returns an error, nothing has changed
// and Edit returns that error.
// If edit changes nothing, the record comes back with its old revision, and only an
// earlier proposal is written. A record that is Empty after the edit is deleted and comes
// back empty.
//
// Edits of one volume are atomic, and run one after the other; those of different
// volumes do not wait for each other. edit must not call Edit.
//
// An edit that asks for a stage or a target at, above or below the path of another
// one, of whatever volume, is refused: FailedPrecondition if that one is to stay,
// Aborted while it is being taken down.
//
// What was asked for can be ended on a full file system. If the end cannot be written, and
// the volume has no file that a restart would read, the end is kept in memory, and written
// with the next edit for which there is room.
//
// Edit blocks for as long as the file system does. InvalidArgument: no record can
// have that id. ResourceExhausted: there is no room for what the edit asks for, and
// for its end. Any other error of Edit's own is unclassified: the write failed, and
// nothing has changed.
func (s *Store) Edit(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, true)
}

// Propose is an Edit that is not written yet: everybody sees the change at once, and it is
// written with the next Edit of the volume, or by Flush. Until then a crash forgets it, so
// nothing may be done for it.
func (s *Store) Propose(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, false)
}

// Flush writes what was proposed of a volume, if that is not written yet. Its errors are
// those of Edit.
func (s *Store) Flush(id string) error {
	if s.proposal(id) == nil {
		return nil
	}
	_, err := s.edit(id, func(*state.Volume) error { return nil }, true)
	return err
}

// proposal returns, for a record that has changes which are not written, what it was before
// them, perhaps Empty; nil: all is written.
func (s *Store) proposal(id string) (written *state.Volume) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.proposed[id]
}

func (s *Store) edit(id string, edit func(*state.Volume) error, write bool) (*state.Volume, error) {
	if id == "" || len(id) > maxIDBytes || !utf8.ValidString(id) {
		return nil, state.Errorf(state.InvalidArgument, "volume id %q: must have 1 to %d bytes of UTF-8", id, maxIDBytes)
	}
	unlock, _ := s.edits.Lock(context.Background(), id) // a wait that nobody ends
	defer unlock()
	current := cmp.Or(s.Get(id), &state.Volume{ID: id, Targets: map[string]*state.Target{}})
	revision := s.revision.Add(1)
	after := current.Clone()
	after.Revision = revision
	if err := edit(after); err != nil {
		return nil, err
	}
	after.ForgetCallers()
	after.ID, after.Revision = id, current.Revision
	if after.Empty() {
		after.Size, after.Targets = nil, map[string]*state.Target{}
	}
	switch same := reflect.DeepEqual(after, current); {
	case !same:
		after.Revision = revision
	case !write || s.proposal(id) == nil:
		return current, nil
	}
	record := after.Clone() // edit may have kept parts of after
	// While a record is being written, the places of both its versions are taken.
	was, is := occupants(current), occupants(record)
	added, left := difference(is, was), difference(was, is)
	if err := s.claim(current, added); err != nil {
		return nil, err
	}
	if err := s.commit(current, record, left, write); err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.places.remove(added)
		return nil, err
	}
	return record, nil
}

// claim takes the places that an edit asks for.
func (s *Store) claim(before *state.Volume, added []occupant) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.places.check(before, added); err != nil {
		return err
	}
	s.places.add(added)
	return nil
}

// commit writes what a record has become, unless it is a proposal, shows it, and gives back
// the places that it has left.
func (s *Store) commit(before, after *state.Volume, left []occupant, write bool) (err error) {
	written := cmp.Or(s.proposal(after.ID), before)
	more := asksMore(written, after)
	if write {
		err = s.recreateLost()
	}
	s.disk.RLock()
	defer s.disk.RUnlock()
	switch {
	case s.dir == nil:
		err = errClosed
	case err == nil && write:
		err = s.dir.put(after, !written.Empty(), more)
	}
	switch {
	case durable.LacksRoom(err) && more:
		return state.Errorf(state.ResourceExhausted, "store %s: volume %s: the file system of the state directory is full, and nothing new can be set up until there is room on it: %w", s.path, after.ID, err)
	case durable.LacksRoom(err) && !s.hasFile(after.ID): // or a crash would bring back what it has
		klog.Background().Error(err, "A record that has no file cannot be written, and is kept in memory: make room", "store", s.path, "volume", after.ID)
	case err != nil:
		return fmt.Errorf("store %s: volume %s: writing the record: %w", s.path, after.ID, err)
	}
	if write {
		written = nil
	}
	s.apply(before, after, left, written)
	return nil
}

func (s *Store) hasFile(id string) bool {
	_, err := os.Lstat(filepath.Join(s.path, fileName(id)))
	return !errors.Is(err, os.ErrNotExist)
}

// intact returns an error if there is another file, or none, at the path of the lock
// or of the directory. Where that cannot be found out, the write will fail.
func (s *Store) intact() error {
	if s.dir == nil { // closed
		return nil
	}
	for _, place := range []struct {
		file *held
		path string
	}{{s.lock, s.lockPath()}, {s.dir.self, s.path}} {
		if same, err := place.file.stillAt(place.path); err == nil && !same {
			return fmt.Errorf("%s was taken away while the plugin runs", place.path)
		}
	}
	return nil
}

// recreateLost makes the directory anew if somebody has removed or replaced it.
func (s *Store) recreateLost() error {
	s.disk.RLock()
	lost := s.intact()
	s.disk.RUnlock()
	if lost == nil {
		return nil
	}
	s.disk.Lock()
	defer s.disk.Unlock()
	if s.intact() == nil { // closed, or somebody else was faster
		return nil
	}
	klog.Background().Error(lost, "The store is made anew with all records", "store", s.path)
	if err := s.recreate(); err != nil {
		return fmt.Errorf("making the store anew, because %w: %w", lost, err)
	}
	return nil
}

// recreate makes the directory anew with all records. It is an error if another
// process has begun a store there.
func (s *Store) recreate() error {
	ctx, cancel := context.WithTimeout(context.Background(), recreateTime)
	defer cancel()
	if err := os.MkdirAll(filepath.Dir(s.path), 0o750); err != nil {
		return err
	}
	if same, err := s.lock.stillAt(s.lockPath()); err != nil {
		return err
	} else if !same {
		f, err := s.acquire(ctx, unix.LOCK_EX)
		if err != nil {
			return fmt.Errorf("another process has begun a store there: stop one of the two: %w", err)
		}
		_ = s.lock.Close() // only locked
		s.lock = f
		if err := f.Truncate(0); err != nil { // what another one left there is not ours
			return err
		}
	}
	d, err := replace(s.path, s.bootID, func(d *directory) error { return d.putAll(s.records(), true) })
	if err != nil {
		return err
	}
	_ = s.dir.close() // only read from
	s.dir = d
	return nil
}

// apply makes a change visible, which has left some places. written is what the record was
// before its changes that are not written; nil: all is written.
func (s *Store) apply(before, after *state.Volume, left []occupant, written *state.Volume) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.proposed[after.ID] = written; written == nil {
		delete(s.proposed, after.ID)
	}
	s.places.remove(left)
	s.indexDevices(before, after)
	if s.volumes[after.ID] = after; after.Empty() {
		delete(s.volumes, after.ID)
	}
}

// asksMore reports whether an edit asks for something to be there that was not
// asked for before.
func asksMore(before, after *state.Volume) bool {
	for _, part := range after.Parts() {
		is, was := after.Latest(part), before.Latest(part)
		if !is.Gone && (was == nil || was.Gone || was.Revision != is.Revision) {
			return true
		}
	}
	return false
}
