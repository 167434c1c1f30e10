package reconciler

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// fakeStore keeps records as JSON, with the contract of store.Store: the edit
// sees the revision it would commit, revisions rise for ever, an edit that
// changes nothing commits nothing, an empty record goes. It sees that nobody changes
// the records that it serves.
type fakeStore struct {
	mu       sync.Mutex
	records  map[string][]byte
	served   map[string]*state.Volume // by record
	written  map[string][]byte        // of records with proposals: what a process that begins now would find
	revision uint64
	fail     func(id string) error             // asked before each commit; nil for none
	edits    func(id string)                   // called before each edit, without the lock; nil for none
	edited   func(before, after *state.Volume) // called after each edit, with the lock; after is before when nothing was committed; nil for none
}

func newFakeStore() *fakeStore {
	return &fakeStore{records: map[string][]byte{}, served: map[string]*state.Volume{}, written: map[string][]byte{}}
}

// begin forgets what was only proposed: a process has ended.
func (s *fakeStore) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, raw := range s.written {
		if s.records[id] = raw; raw == nil {
			delete(s.records, id)
		}
	}
	clear(s.written)
}

// lose forgets all records.
func (s *fakeStore) lose() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.records)
	clear(s.written)
}

func (s *fakeStore) Get(id string) *state.Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.get(id)
}

func (s *fakeStore) get(id string) *state.Volume {
	raw, ok := s.records[id]
	if !ok {
		return nil
	}
	v := &state.Volume{}
	if err := json.Unmarshal(raw, v); err != nil {
		panic(err)
	}
	served := s.served[string(raw)]
	if served == nil {
		served, s.served[string(raw)] = v, v
	}
	if !reflect.DeepEqual(served, v) {
		panic(fmt.Sprintf("somebody changed the record %s: it is %s now", raw, marshal(served)))
	}
	return served
}

func (s *fakeStore) List() []*state.Volume {
	s.mu.Lock()
	defer s.mu.Unlock()
	var all []*state.Volume
	for _, id := range slices.Sorted(maps.Keys(s.records)) {
		all = append(all, s.get(id))
	}
	return all
}

func (s *fakeStore) VolumesAt(path string) []string {
	var ids []string
	for _, v := range s.List() {
		paths := v.TargetPaths()
		if v.Stage != nil {
			paths = append(paths, v.Stage.Path)
		}
		if slices.ContainsFunc(paths, func(own string) bool { return own == path || state.Within(own, strings.TrimSuffix(path, "/")) }) {
			ids = append(ids, v.ID)
		}
	}
	return ids
}

func (s *fakeStore) VolumeOfDevice(number state.DeviceNumber) string {
	for _, v := range s.List() {
		for _, t := range v.Targets {
			if t.Device == number && number != (state.DeviceNumber{}) {
				return v.ID
			}
		}
	}
	return ""
}

func (s *fakeStore) Edit(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, true)
}

func (s *fakeStore) Propose(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, false)
}

func (s *fakeStore) Flush(id string) error {
	_, err := s.Edit(id, func(*state.Volume) error { return nil })
	return err
}

func (s *fakeStore) proposed(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, is := s.written[id]
	return is
}

func (s *fakeStore) edit(id string, edit func(*state.Volume) error, write bool) (*state.Volume, error) {
	if s.edits != nil {
		s.edits(id)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.get(id)
	if before == nil {
		before = &state.Volume{ID: id, Targets: map[string]*state.Target{}}
	}
	after := before
	if s.edited != nil {
		defer func() { s.edited(before, after) }()
	}
	v := before.Clone()
	v.Revision = s.revision + 1
	if err := edit(v); err != nil {
		return nil, err
	}
	committed := v.Revision
	v.Revision = before.Revision
	_, proposed := s.written[id]
	same := marshal(v) == marshal(before)
	if same && !(write && proposed) {
		return before, nil
	}
	if s.fail != nil && write {
		if err := s.fail(id); err != nil {
			return nil, err
		}
	}
	if !write && !proposed {
		s.written[id] = s.records[id]
	} else if write {
		delete(s.written, id)
	}
	if same {
		return before, nil
	}
	v.Revision, s.revision = committed, committed
	after = v
	if v.Empty() {
		delete(s.records, id)
		return &state.Volume{ID: id, Targets: map[string]*state.Target{}}, nil
	}
	s.records[id] = []byte(marshal(v))
	return s.get(id), nil
}

func marshal(v *state.Volume) string {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(raw)
}

// processStore is the store as one process sees it: none after its death.
type processStore struct {
	*fakeStore
	p *process
}

func (s processStore) Edit(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, true)
}

func (s processStore) Propose(id string, edit func(*state.Volume) error) (*state.Volume, error) {
	return s.edit(id, edit, false)
}

func (s processStore) Flush(id string) error {
	s.p.k.with(func() {
		if s.p.k.flushing[id]++; s.p.k.flushing[id] == 1 { // else the worker goes on while answers are made durable
			s.p.k.answering[id] = s.p.k.spokenOf(id)
		}
	})
	defer s.p.k.with(func() { s.p.k.flushing[id]-- })
	if !s.proposed(id) {
		return nil
	}
	_, err := s.Edit(id, func(*state.Volume) error { return nil })
	return err
}

func (s processStore) edit(id string, edit func(*state.Volume) error, write bool) (*state.Volume, error) {
	k := s.p.k
	var dead bool
	var before, after time.Duration
	k.with(func() {
		n := k.calls[callKey{opCommit, id}]
		k.calls[callKey{opCommit, id}] = n + 1
		before, after = k.delay("before", id, n), k.delay("after", id, n)
	})
	time.Sleep(before)
	if k.with(func() { dead = s.p.dead }); dead {
		return nil, errDead
	}
	record, err := s.fakeStore.edit(id, edit, write)
	time.Sleep(after)
	return record, err
}
