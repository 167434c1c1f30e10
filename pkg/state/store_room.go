package state

import (
	"errors"
	"maps"
	"reflect"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
)

const (
	// spareBytes of the file are kept beside as much as all records take.
	spareBytes = 64 << 10
	// rewriteEvery is how often it is tried to write what could not be written.
	rewriteEvery = 5 * time.Second
)

// room sees to it that the file owns the blocks for so many more bytes of
// records, and for another copy of every page: bbolt writes a page that changes
// to another place, and gives the old one free only then. So whatever is asked
// to go can be written when the file system has no block left. A file system
// that cannot give blocks in advance owes nothing.
func (s *Store) room(bytes int) error {
	want := 2*(s.used+int64(bytes)) + spareBytes
	if want <= s.owned || s.intact() != nil { // a lost file is made anew by the write
		return nil
	}
	want = (want + spareBytes) &^ (spareBytes - 1) // not for each edit anew
	conn, err := s.file.SyscallConn()
	if err != nil {
		return err
	}
	controlErr := conn.Control(func(fd uintptr) {
		for {
			if err = unix.Fallocate(int(fd), 0, 0, want); !errors.Is(err, unix.EINTR) {
				return
			}
		}
	})
	if err = errors.Join(controlErr, err); err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return err
	}
	s.owned = want
	return s.measure()
}

// asksMore reports whether an edit asks for something to be there that was not
// asked for before.
func asksMore(before, after *Volume) bool {
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
func removesOnly(before, after *Volume) bool {
	standing := func(v *Volume) *Volume {
		v = v.Clone()
		v.Revision = 0
		if v.Stage != nil && v.Stage.Gone && v.Stage.Next == nil {
			v.Stage = nil
		}
		maps.DeleteFunc(v.Targets, func(_ string, t *Target) bool { return t.Gone && t.Next == nil })
		return v
	}
	was, is := standing(before), standing(after)
	if is.Stage == nil {
		was.Stage = nil
	}
	if is.Size == nil {
		was.Size = nil
	}
	maps.DeleteFunc(was.Targets, func(path string, _ *Target) bool { return is.Targets[path] == nil })
	return len(was.Targets) == len(is.Targets) && reflect.DeepEqual(was.Stage, is.Stage) && reflect.DeepEqual(was.Size, is.Size) &&
		(len(is.Targets) == 0 || reflect.DeepEqual(was.Targets, is.Targets))
}

// withUnwritten adds to the changes of a commit those records that memory alone
// has.
func (s *Store) withUnwritten(changes map[string]change) (map[string]change, error) {
	if len(s.unwritten) == 0 {
		return changes, nil
	}
	all := map[string]change{}
	for id := range s.unwritten {
		c, err := s.current(id)
		if err != nil {
			return nil, err
		}
		all[id] = c
	}
	maps.Copy(all, changes)
	return all, nil
}

// current returns the change that would write a record as memory has it.
func (s *Store) current(id string) (change, error) {
	v := s.records[id]
	if v == nil {
		return change{record: &Volume{ID: id}}, nil
	}
	value, err := encodeRecord(v)
	return change{v, value}, err
}

// keep lets removals that cannot be written take place in memory, where they are
// served from, and returns them: what is not there any more must not be asked
// for because a disk is full. They are written as soon as that can be done.
func (s *Store) keep(changes map[string]change, cause error) map[string]change {
	kept := map[string]change{}
	for id, c := range changes {
		before := s.records[id]
		if before == nil {
			before = &Volume{ID: id}
		}
		if removesOnly(before, c.record) {
			kept[id] = c
			s.unwritten[id] = true
		}
	}
	if len(kept) > 0 {
		klog.Background().Error(cause, "Removals cannot be written, and are kept in memory until they can: make room", "store", s.path, "records", len(s.unwritten))
		s.show(kept)
	}
	return kept
}

// rewrite tries to write what memory alone has.
func (s *Store) rewrite() error {
	if len(s.unwritten) == 0 {
		return nil
	}
	all, err := s.withUnwritten(nil)
	if err != nil {
		return err
	}
	if err := s.write(all); err != nil {
		return err
	}
	klog.Background().Info("Removals that were kept in memory are written", "store", s.path, "records", len(s.unwritten))
	clear(s.unwritten)
	return nil
}
