package state

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	bolterrors "go.etcd.io/bbolt/errors"
)

const testBoot = "boot-1"

func storePath(t testing.TB) string { return filepath.Join(t.TempDir(), "state", "intents.db") }

func openStore(t testing.TB, path, bootID string) *Store {
	t.Helper()
	s, err := Open(t.Context(), path, bootID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s
}

func closeStore(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
}

// staged returns an edit that stages the volume at path.
func staged(path string) func(*Volume) error {
	return func(v *Volume) error {
		return v.AskStage(&Stage{
			Path:       path,
			Capability: Capability{Access: MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"noatime"}},
			Context:    map[string]string{"key": "value"},
		}, time.Now())
	}
}

func published(target string) func(*Volume) error {
	return func(v *Volume) error {
		return v.AskPublish(&Target{
			Path:       target,
			Capability: Capability{Access: MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"},
		}, v.Stage.Path, time.Now())
	}
}

// emptied returns an edit that leaves nothing of the volume.
func emptied(v *Volume) error {
	v.Stage, v.Targets = nil, nil
	return nil
}

func mustEdit(t testing.TB, s *Store, id string, edit func(*Volume) error) *Volume {
	t.Helper()
	v, err := s.Edit(id, edit)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestEditKeepsRecordsOverReopen(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	want := map[string]*Volume{}
	for _, id := range []string{"b", "a", "π \x00 / odd"} {
		mustEdit(t, s, id, staged("/stage/"+id))
		want[id] = mustEdit(t, s, id, published("/pod/"+id))
	}
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	list := s.List()
	if len(list) != 3 || list[0].ID != "a" || list[1].ID != "b" {
		t.Fatalf("the list is %v, not all records by id", list)
	}
	for id, v := range want {
		if got := s.Get(id); !sameRecord(got, v) {
			t.Errorf("volume %q is %+v after reopening, was %+v", id, got, v)
		}
	}
	if s.SetAside() != "" {
		t.Errorf("a sound store was set aside to %s", s.SetAside())
	}
	if s.Get("unknown") != nil {
		t.Error("there is a record of an unknown volume")
	}
}

// sameRecord compares what is stored of two records.
func sameRecord(a, b *Volume) bool {
	textA, errA := encodeRecord(a)
	textB, errB := encodeRecord(b)
	return errA == nil && errB == nil && string(textA) == string(textB)
}

func TestEditOutcomes(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	first := mustEdit(t, s, "v", func(v *Volume) error {
		if v.ID != "v" || v.Revision == 0 || v.Targets == nil || !v.Empty() {
			t.Errorf("a fresh record is %+v", v)
		}
		return staged("/stage")(v)
	})
	if first.Revision == 0 || first.Stage.Revision != first.Revision {
		t.Errorf("the intent has revision %d, the record %d", first.Stage.Revision, first.Revision)
	}

	refusal := Errorf(AlreadyExists, "no")
	if _, err := s.Edit("v", func(v *Volume) error {
		v.Stage.Path, v.Stage.Context["key"], v.Stage.Capability.Flags[0] = "/elsewhere", "x", "x"
		return refusal
	}); err != refusal {
		t.Errorf("the edit's error came back as %v", err)
	}
	if got := s.Get("v"); !sameRecord(got, first) {
		t.Errorf("a refused edit changed the record to %+v", got)
	}

	again := mustEdit(t, s, "v", func(v *Volume) error {
		v.Stage.Asked = true
		return staged("/stage")(v)
	})
	if !reflect.DeepEqual(again, s.Get("v")) || again.Revision != first.Revision || again.Stage.Asked {
		t.Errorf("an edit that changed nothing returned %+v, the record is %+v", again, first)
	}

	kept := mustEdit(t, s, "v", published("/pod"))
	kept.Stage.Context["key"], kept.Targets["/pod"].Path = "mine", "mine"
	if got := s.Get("v"); got.Stage.Context["key"] != "value" || got.Targets["/pod"].Path != "/pod" {
		t.Errorf("the caller's copy is shared with the store: %+v", got)
	}
	renamed := mustEdit(t, s, "v", func(v *Volume) error { v.ID, v.Revision = "w", 1; v.Stage.Path = "/s"; return nil })
	if renamed.ID != "v" || renamed.Revision <= kept.Revision || s.Get("w") != nil {
		t.Errorf("an edit chose its own id or revision: %+v", renamed)
	}
}

func TestEditDeletesEmptyRecords(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", staged("/stage"))
	before := mustEdit(t, s, "v", func(v *Volume) error { return v.AskSize(1<<30, 0, time.Now()) })
	gone := mustEdit(t, s, "v", emptied)
	if !gone.Empty() || gone.Size != nil || gone.ID != "v" || gone.Revision <= before.Revision {
		t.Errorf("the deleted record came back as %+v", gone)
	}
	if s.Get("v") != nil || len(s.List()) != 0 {
		t.Error("an empty record is still there")
	}
	if v := mustEdit(t, s, "v", emptied); v.Revision != 0 || !v.Empty() || v.Targets == nil {
		t.Errorf("emptying what is empty returned %+v", v)
	}
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	if s.Get("v") != nil {
		t.Error("a deleted record is back after reopening")
	}
	if v := mustEdit(t, s, "v", staged("/stage")); v.Revision <= gone.Revision {
		t.Errorf("revision %d after reopening is not later than %d before", v.Revision, gone.Revision)
	}
}

func TestEditRefusesIDs(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	for _, id := range []string{"", "\xff", strings.Repeat("x", maxIDBytes+1)} {
		if _, err := s.Edit(id, staged("/stage")); ClassOf(err) != InvalidArgument {
			t.Errorf("id %.9q: %v", id, err)
		}
	}
	mustEdit(t, s, strings.Repeat("x", maxIDBytes), staged("/stage"))
}

func TestEditsAreAtomic(t *testing.T) {
	const writers, edits = 32, 8
	path := storePath(t)
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "same", staged("/same"))
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			own, last := fmt.Sprint("own-", w), uint64(0)
			for n := range edits {
				for _, id := range []string{"same", own} {
					v, err := s.Edit(id, func(v *Volume) error {
						if v.Stage == nil {
							v.Stage = &Stage{Path: "/" + id}
						}
						target := fmt.Sprintf("/pod/%s/%d/%d", id, w, n)
						v.Targets[target] = &Target{Path: target, Intent: Intent{Revision: v.Revision}}
						return nil
					})
					if err != nil {
						t.Error(err)
						return
					}
					if v.Revision <= last || v.Targets[fmt.Sprintf("/pod/%s/%d/%d", id, w, n)].Revision != v.Revision {
						t.Errorf("revision %d after %d", v.Revision, last)
					}
					last = v.Revision
					if got := s.Get(id); got.Revision < v.Revision {
						t.Errorf("volume %s: reads revision %d after an edit returned %d", id, got.Revision, v.Revision)
					}
				}
				s.List()
			}
		})
	}
	wg.Wait()
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	if n := len(s.Get("same").Targets); n != writers*edits {
		t.Errorf("%d of %d concurrent edits of one volume are there", n, writers*edits)
	}
	for w := range writers {
		if n := len(s.Get(fmt.Sprint("own-", w)).Targets); n != edits {
			t.Errorf("writer %d: %d of %d edits are there", w, n, edits)
		}
	}
}

// In one commit an edit that fails to encode must not take others with it, and
// a failed write must take all that were built on it.
func TestCommitIsolatesFailures(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	requests := func(edits ...func(*Volume) error) []*request {
		var rs []*request
		for i, edit := range edits {
			rs = append(rs, &request{id: []string{"a", "b", "a"}[i], edit: edit, done: make(chan struct{})})
		}
		return rs
	}
	far := func(v *Volume) error {
		v.Stage = &Stage{Intent: Intent{Since: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}}
		return nil
	}
	rs := requests(far, staged("/b"), staged("/a"))
	s.commit(rs)
	if rs[0].err == nil || rs[1].err != nil || rs[2].err != nil || s.Get("b") == nil || s.Get("a").Stage.Path != "/a" {
		t.Fatalf("errors %v, %v, %v", rs[0].err, rs[1].err, rs[2].err)
	}

	if err := s.db.Close(); err != nil {
		t.Fatal(err)
	}
	rs = requests(published("/pod"), func(*Volume) error { return nil }, published("/pod"))
	s.commit(rs)
	if rs[0].err == nil || rs[1].err != nil || rs[2].err == nil {
		t.Errorf("errors of a failed write: %v, %v, %v", rs[0].err, rs[1].err, rs[2].err)
	}
	if !errors.Is(rs[0].err, bolterrors.ErrDatabaseNotOpen) || ClassOf(rs[0].err) != Unavailable {
		t.Errorf("a failed write is %v", rs[0].err)
	}
	if v := s.Get("a"); len(v.Targets) != 0 {
		t.Errorf("what was not written is seen: %+v", v)
	}
}

func TestCloseEndsEdits(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				if _, err := s.Edit(fmt.Sprint(w), staged(fmt.Sprint("/", n))); errors.Is(err, errClosed) {
					return
				} else if err != nil && ClassOf(err) != AlreadyExists {
					t.Error(err)
					return
				}
			}
		})
	}
	closeStore(t, s)
	wg.Wait()
	closeStore(t, s)
}

func TestAnotherBootDropsRecords(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	before := mustEdit(t, s, "v", staged("/stage"))
	closeStore(t, s)
	s = openStore(t, path, "boot-2")
	if len(s.List()) != 0 {
		t.Fatal("there are records of another boot")
	}
	if after := mustEdit(t, s, "w", staged("/other")); after.Revision <= before.Revision {
		t.Errorf("revision %d after the boot is not later than %d", after.Revision, before.Revision)
	}
	closeStore(t, s)
	s = openStore(t, path, "boot-2")
	if s.Get("w") == nil || s.Get("v") != nil {
		t.Errorf("in the new boot there are %v", s.List())
	}
}

func TestOpenMakesPrivateFile(t *testing.T) {
	path := storePath(t)
	openStore(t, path, testBoot)
	for name, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): os.ModeDir | 0o750} {
		info, err := os.Stat(name)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode() != want {
			t.Errorf("%s has mode %s, not %s", name, info.Mode(), want)
		}
	}
}

func TestOpenReadOnly(t *testing.T) {
	bootID, err := BootID()
	if err != nil {
		t.Fatal(err)
	}
	path := storePath(t)
	if _, err := OpenReadOnly(t.Context(), path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no store: %v", err)
	}
	s := openStore(t, path, bootID)
	want := mustEdit(t, s, "v", staged("/stage"))

	if _, err := OpenReadOnly(t.Context(), path); !errors.Is(err, ErrLocked) {
		t.Errorf("a store in use: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := OpenReadOnly(ctx, path); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}

	closeStore(t, s)
	r, err := OpenReadOnly(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if got := r.Get("v"); !sameRecord(got, want) || len(r.List()) != 1 {
		t.Errorf("reads %+v, not %+v", got, want)
	}
	if _, err := r.Edit("v", emptied); err == nil {
		t.Error("a read-only store took an edit")
	}
	s = openStore(t, path, "another boot") // not kept out by r
	mustEdit(t, s, "v", staged("/stage"))
	closeStore(t, r)
	closeStore(t, s)
	if r, err = OpenReadOnly(t.Context(), path); err != nil || len(r.List()) != 0 {
		t.Errorf("records of another boot: %v, %v", r, err)
	}
}

func TestOpenReadOnlyChangesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "intents.db")
	for _, contents := range []string{"", "garbage", strings.Repeat("\xff", 1<<15)} {
		if err := os.WriteFile(path, []byte(contents), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := OpenReadOnly(t.Context(), path)
		if contents == "" && (err != nil || len(s.List()) != 0) || contents != "" && !errors.Is(err, ErrCorrupt) {
			t.Errorf("%.7q: %v", contents, err)
		}
		if got, err := os.ReadFile(path); err != nil || string(got) != contents {
			t.Errorf("%.7q: the file has changed (%v)", contents, err)
		}
	}
}

func TestBootID(t *testing.T) {
	a, err := BootID()
	if err != nil || len(a) != 36 {
		t.Errorf("boot id %q: %v", a, err)
	}
}

func TestShownAs(t *testing.T) {
	s := openStore(t, filepath.Join(t.TempDir(), "intents.db"), "boot")
	number := DeviceNumber{Major: 7, Minor: 3}
	_, err := s.Edit("v", func(v *Volume) error {
		if err := v.AskUnpublish("/pod", time.Now()); err != nil {
			return err
		}
		v.Targets["/pod"].Device = number
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got := s.ShownAs(number); got != "v" {
		t.Errorf("%q is shown as %s", got, number)
	}
	if got := s.ShownAs(DeviceNumber{Major: 7, Minor: 4}); got != "" {
		t.Errorf("%q is shown as another number", got)
	}
}
