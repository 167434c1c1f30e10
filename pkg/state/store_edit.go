package state

import (
	"errors"
	"fmt"
	"reflect"
	"time"
	"unicode/utf8"

	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

// maxIDBytes bounds a volume id; CSI spec v1.13 allows 128 bytes in a string
// without its own limit, and bbolt 32768 in a key.
const maxIDBytes = 1024

var errClosed = errors.New("the store is closed: the plugin is stopping")

// request is one call of Edit on its way through the committer.
type request struct {
	id   string
	edit func(*Volume) error

	record *Volume // the outcome: a record or an error
	err    error
	done   chan struct{} // closed when the outcome stands
}

// change is a record that a commit writes; an empty one is deleted.
type change struct {
	record *Volume
	value  []byte
}

// Edit changes one record and returns a copy of it. The change is durable when
// Edit returns, and nobody sees it before.
//
// edit is called once, with a copy of the record (a fresh one with only ID and
// Revision, and Targets not nil, if there is none). Its Revision is the one that
// this edit will commit; revisions rise for as long as the file lives, whatever
// is deleted, and not every one is used. If edit returns an error, nothing has
// changed and Edit returns that error. If edit leaves the record as it was, nothing is
// written and the record comes back with its old revision. A record that is
// Empty after the edit is deleted and comes back empty.
//
// Edits of one volume are atomic. Concurrent edits share commits: edit runs on
// the committer's goroutine, so it must not block, nor call Edit.
//
// An edit that asks for a stage or a target at, above or below the path of another
// one, of whatever volume, is refused: FailedPrecondition if that one is to stay,
// Aborted while it is being taken down.
//
// An edit that only removes succeeds although it cannot be written: it holds in
// memory, and is written as soon as there is room.
//
// Edit blocks for as long as the disk does. InvalidArgument: no record can have
// that id. ResourceExhausted: there is no room for what the edit asks for beside
// the room that removals need. Any other error of Edit's own is unclassified: the write failed, the
// change is not seen, and only after a restart of the plugin may it turn out to be there.
func (s *Store) Edit(id string, edit func(*Volume) error) (*Volume, error) {
	switch {
	case s.closing == nil:
		return nil, fmt.Errorf("store %s: volume %s: opened only for reading", s.path, id)
	case id == "" || len(id) > maxIDBytes || !utf8.ValidString(id):
		return nil, Errorf(InvalidArgument, "volume id %q: must have 1 to %d bytes of UTF-8", id, maxIDBytes)
	}
	r := &request{id: id, edit: edit, done: make(chan struct{})}
	select {
	case s.requests <- r:
		<-r.done
		return r.record, r.err
	case <-s.closing:
		return nil, fmt.Errorf("store %s: volume %s: %w", s.path, id, errClosed)
	}
}

// commitAll is the committer: it puts whatever edits are waiting into one
// commit, again and again, until the store closes. bbolt's own DB.Batch would
// make a lone edit wait for a timer, fifty times as long as a commit on a tmpfs.
func (s *Store) commitAll() {
	defer close(s.stopped)
	for {
		var again <-chan time.Time
		if len(s.unwritten) > 0 {
			again = time.After(rewriteEvery)
		}
		select {
		case r := <-s.requests:
			s.commit(s.withWaiting(r))
		case <-again:
			_ = s.rewrite() // the cause was logged, and it is tried again
		case <-s.closing:
			s.closeErr = errors.Join(s.rewrite(), closeDB(s.db, s.file))
			return
		}
	}
}

// withWaiting returns the first request and those that wait behind it now.
func (s *Store) withWaiting(first *request) []*request {
	rs := []*request{first}
	for {
		select {
		case r := <-s.requests:
			rs = append(rs, r)
		default:
			return rs
		}
	}
}

// commit applies the edits, writes what they changed, shows it, and answers.
func (s *Store) commit(rs []*request) {
	changes := map[string]change{}
	for _, r := range rs {
		r.record, r.err = s.apply(r, changes)
	}
	all, err := s.withUnwritten(changes)
	if err == nil {
		err = s.write(all)
	}
	kept := changes
	if err == nil {
		if len(s.unwritten) > 0 {
			clear(s.unwritten)
		}
		s.show(changes)
	} else {
		kept = s.keep(changes, err)
	}
	if err != nil {
		s.places = nil // it has what was not written
	}
	for _, r := range rs {
		// Refusals and repeats, too, are answers to a record that was not written.
		if _, changed := changes[r.id]; changed && kept[r.id].record == nil {
			r.record, r.err = nil, fmt.Errorf("store %s: volume %s: writing the record: %w", s.path, r.id, err)
		}
		close(r.done)
	}
}

// apply runs one edit on top of the changes so far and adds its own to them.
func (s *Store) apply(r *request, changes map[string]change) (*Volume, error) {
	current := s.records[r.id]
	if c, changed := changes[r.id]; changed {
		current = c.record
	}
	if current == nil {
		current = &Volume{ID: r.id, Targets: map[string]*Target{}}
	}
	s.revision++
	v := deepCopy(current)
	v.Revision = s.revision
	if err := r.edit(v); err != nil {
		return nil, err
	}
	v = deepCopy(v)
	v.ID, v.Revision = r.id, current.Revision
	if v.Empty() {
		v.Size = nil
	}
	if reflect.DeepEqual(v, current) {
		return v, nil
	}
	v.Revision = s.revision
	if s.places == nil {
		s.places = newPlaces(s.records)
	}
	if err := s.places.apart(current, v); err != nil {
		return nil, err
	}
	value, err := encodeRecord(v)
	if err != nil {
		return nil, fmt.Errorf("store %s: volume %s: encoding the record: %w", s.path, r.id, err)
	}
	if asksMore(current, v) {
		if err := s.room(len(value)); err != nil {
			return nil, s.refuse(r.id, err)
		}
	}
	s.places.move(current, v)
	changes[r.id] = change{record: v, value: value}
	return deepCopy(v), nil
}

// refuse says why what is asked for cannot be remembered.
func (s *Store) refuse(id string, err error) error {
	if !errors.Is(err, unix.ENOSPC) && !errors.Is(err, unix.EDQUOT) {
		return fmt.Errorf("store %s: volume %s: making room for the record: %w", s.path, id, err)
	}
	return Errorf(ResourceExhausted, "store %s: volume %s: the file system of the state directory is full, and nothing new can be set up until there is room on it: %w", s.path, id, err)
}

// write makes the changes durable, all or none. If somebody has taken the file
// away, or damaged it, it is made anew with all records.
func (s *Store) write(changes map[string]change) error {
	if len(changes) == 0 {
		return nil
	}
	lost := s.intact()
	if lost == nil {
		err := guarded(func() error {
			return s.db.Update(func(tx *bolt.Tx) error { return put(tx, s.revision, changes) })
		})
		if err == nil {
			err = s.measure()
		}
		if !errors.Is(err, ErrCorrupt) {
			return err
		}
		lost = err
	}
	klog.Background().Error(lost, "The store's file was taken away or damaged while the plugin runs; it is made anew with all records", "store", s.path)
	return s.renew(changes)
}

func put(tx *bolt.Tx, revision uint64, changes map[string]change) error {
	records := tx.Bucket(recordsBucket)
	if err := records.SetSequence(revision); err != nil {
		return err
	}
	for id, c := range changes {
		var err error
		if c.record.Empty() {
			err = records.Delete([]byte(id))
		} else {
			err = records.Put([]byte(id), c.value)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// show makes the changes visible.
func (s *Store) show(changes map[string]change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, c := range changes {
		if c.record.Empty() {
			delete(s.records, id)
		} else {
			s.records[id] = c.record
		}
	}
}
