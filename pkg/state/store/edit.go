package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/state"
)

// maxIDBytes bounds a volume id; CSI spec v1.13 allows 128 bytes in a string
// without its own limit.
const maxIDBytes = 1024

// rewriteEvery is how often it is tried to write what could not be written.
const rewriteEvery = 5 * time.Second

// renewTime bounds the wait for a lock that nobody else should have.
const renewTime = time.Second

var errClosed = errors.New("the store is closed: the plugin is stopping")

// Edit changes one record and returns a copy of it. The change is in the file
// system when Edit returns, and nobody sees it before.
//
// edit is called once, with a copy of the record (a fresh one with only ID and
// Revision, and Targets not nil, if there is none). Its Revision is the one that
// this edit will commit: revisions rise for as long as the process lives, a later
// process begins behind those of the records that it finds, and not every one is
// used. If edit returns an error, nothing has changed and Edit returns that error.
// If edit leaves the record as it was, nothing is written and the record comes back
// with its old revision. A record that is Empty after the edit is deleted and comes
// back empty.
//
// Edits of one volume are atomic, and run one after the other; those of different
// volumes wait for nothing in common. edit must not call Edit.
//
// An edit that asks for a stage or a target at, above or below the path of another
// one, of whatever volume, is refused: FailedPrecondition if that one is to stay,
// Aborted while it is being taken down.
//
// An edit that only removes succeeds although it cannot be written: it holds in
// memory, and is written as soon as there is room.
//
// Edit blocks for as long as the file system does. InvalidArgument: no record can
// have that id. ResourceExhausted: there is no room for what the edit asks for
// beside the room that removals need. Any other error of Edit's own is
// unclassified: the write failed, and nothing has changed.
func (s *Store) Edit(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	switch {
	case s.later == nil:
		return nil, fmt.Errorf("store %s: volume %s: opened only for reading", s.path, id)
	case id == "" || len(id) > maxIDBytes || !utf8.ValidString(id):
		return nil, state.Errorf(state.InvalidArgument, "volume id %q: must have 1 to %d bytes of UTF-8", id, maxIDBytes)
	case s.closed.Load():
		return nil, fmt.Errorf("store %s: volume %s: %w", s.path, id, errClosed)
	}
	after, written, err := s.change(id, edit)
	if written {
		_ = s.rewrite() // what failed is tried again, see rewriteLater
	}
	return after, err
}

// change runs one edit, and reports whether its outcome was written.
func (s *Store) change(id string, edit func(*state.Volume) error) (_ *state.Volume, written bool, err error) {
	unlock, err := s.edits.Lock(context.Background(), id)
	if err != nil {
		return nil, false, err
	}
	defer unlock()
	current := cmp.Or(s.record(id), &state.Volume{ID: id, Targets: map[string]*state.Target{}})
	revision := s.revision.Add(1)
	after := current.Stored()
	after.Revision = revision
	if err := edit(after); err != nil {
		return nil, false, err
	}
	after = after.Stored()
	after.ID, after.Revision = id, current.Revision
	if after.Empty() {
		after.Size = nil
	}
	if reflect.DeepEqual(after, current) {
		return after, false, nil
	}
	after.Revision = revision
	text, err := encode(s.bootID, after)
	if err != nil {
		return nil, false, fmt.Errorf("store %s: volume %s: encoding the record: %w", s.path, id, err)
	}
	if err := s.claim(current, after); err != nil {
		return nil, false, err
	}
	written, err = s.commit(current, after, text)
	if err != nil {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.places.release(after, current)
		return nil, false, err
	}
	return after.Stored(), written, nil
}

// claim takes the places that an edit asks for.
func (s *Store) claim(before, after *state.Volume) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.places.apart(before, after); err != nil {
		return err
	}
	s.places.claim(before, after)
	return nil
}

// commit writes what a record has become, and shows it; a removal is shown though
// it cannot be written.
func (s *Store) commit(before, after *state.Volume, text []byte) (written bool, err error) {
	more := asksMore(before, after)
	err = s.onDisk(func(d *directory) error {
		if err := d.put(after, text, more); err != nil {
			return err
		}
		s.publish(before, after, true)
		return nil
	})
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, errClosed):
	case removesOnly(before, after):
		klog.Background().Error(err, "A removal cannot be written, and is kept in memory until it can: make room", "store", s.path, "volume", after.ID)
		s.publish(before, after, false)
		return false, nil
	case more && isFull(err):
		return false, state.Errorf(state.ResourceExhausted, "store %s: volume %s: the file system of the state directory is full, and nothing new can be set up until there is room on it: %w", s.path, after.ID, err)
	}
	return false, fmt.Errorf("store %s: volume %s: writing the record: %w", s.path, after.ID, err)
}

// onDisk runs write with the directory, which is not closed meanwhile, and made
// anew first if somebody has taken it away.
func (s *Store) onDisk(write func(*directory) error) error {
	for {
		s.disk.RLock()
		if s.dir == nil {
			s.disk.RUnlock()
			return errClosed
		}
		lost := s.dir.intact()
		if lost == nil {
			defer s.disk.RUnlock()
			return write(s.dir)
		}
		s.disk.RUnlock()
		if err := s.renew(lost); err != nil {
			return fmt.Errorf("making the store anew, because %w: %w", lost, err)
		}
	}
}

// renew puts a new directory with all records in the place of the one that was
// lost. If another process has begun a store there, that is an error.
func (s *Store) renew(lost error) error {
	s.disk.Lock()
	defer s.disk.Unlock()
	if s.dir == nil || s.dir.intact() == nil { // closed, or somebody else was faster
		return nil
	}
	klog.Background().Error(lost, "The store is made anew with all records", "store", s.path)
	ctx, cancel := context.WithTimeout(context.Background(), renewTime)
	defer cancel()
	stateDir := filepath.Dir(s.path)
	if err := os.MkdirAll(stateDir, 0o750); err != nil {
		return err
	}
	if same, err := stillAt(s.legacy, legacyPath(stateDir)); err != nil {
		return err
	} else if !same {
		f, _, err := opener{deadHolder}.lockLegacy(ctx, legacyPath(stateDir), unix.LOCK_EX)
		if err != nil {
			return fmt.Errorf("another process has begun a store there: stop one of the two: %w", err)
		}
		_ = s.legacy.Close() // only locked
		s.legacy = f
		if err := f.Truncate(0); err != nil { // what another one left there is not ours
			return err
		}
	}
	d, err := replace(s.path, func(d *directory) error {
		for _, v := range s.records() {
			if err := d.write(s.bootID, v); err != nil {
				return err
			}
		}
		return d.fill()
	})
	if err != nil {
		return err
	}
	_ = s.dir.close() // only locked
	s.dir = d
	return nil
}

// publish makes a change visible.
func (s *Store) publish(before, after *state.Volume, written bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.places.release(before, after)
	s.show(before, after)
	if s.volumes[after.ID] = after; after.Empty() {
		delete(s.volumes, after.ID)
	}
	if written {
		delete(s.unwritten, after.ID)
		return
	}
	s.unwritten[after.ID] = true
	s.later.Reset(rewriteEvery)
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

// removesOnly reports whether an edit leaves every intent that is to stay as it
// was.
func removesOnly(before, after *state.Volume) bool {
	standing := func(i state.Intent, next bool) bool { return !i.Gone || next }
	if s := after.Stage; s != nil && standing(s.Intent, s.Next != nil) && !reflect.DeepEqual(s, before.Stage) {
		return false
	}
	for path, t := range after.Targets {
		if standing(t.Intent, t.Next != nil) && !reflect.DeepEqual(t, before.Targets[path]) {
			return false
		}
	}
	return after.Size == nil || reflect.DeepEqual(after.Size, before.Size)
}

// rewriteLater tries until it is done.
func (s *Store) rewriteLater() {
	if s.rewrite() != nil && !s.closed.Load() {
		s.later.Reset(rewriteEvery)
	}
}

// rewrite tries to write what memory alone has.
func (s *Store) rewrite() (err error) {
	s.mu.RLock()
	ids := maps.Clone(s.unwritten)
	s.mu.RUnlock()
	for id := range ids {
		err = errors.Join(err, s.rewriteOne(id))
	}
	if len(ids) > 0 && err == nil {
		klog.Background().Info("What was kept in memory alone is written", "store", s.path, "records", len(ids))
	}
	return err
}

func (s *Store) rewriteOne(id string) error {
	unlock, err := s.edits.Lock(context.Background(), id)
	if err != nil {
		return err
	}
	defer unlock()
	record := cmp.Or(s.record(id), &state.Volume{ID: id})
	return s.onDisk(func(d *directory) error {
		if err := d.write(s.bootID, record); err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.unwritten, id)
		return nil
	})
}
