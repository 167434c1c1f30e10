package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/klog/v2/ktesting"

	"github.com/csi-node/csi-node/pkg/internal/boot"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

const testBoot = "boot-1"

func openStore(t testing.TB, dir, bootID string) *Store {
	t.Helper()
	s, err := Open(t.Context(), dir, bootID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s
}

func closeStore(t testing.TB, s *Store) {
	t.Helper()
	must(t, s.Close())
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// crash ends a store as a kill does: nothing is written any more.
func crash(t testing.TB, s *Store) {
	t.Helper()
	s.closed.Store(true)
	s.disk.Lock()
	defer s.disk.Unlock()
	must(t, s.letGo())
}

// fileOf returns the path of a volume's file.
func fileOf(dir, id string) string { return filepath.Join(dir, Directory, fileName(id)) }

// staged returns an edit that stages the volume at path, published one that
// publishes it, and emptied leaves nothing of it.
func staged(path string) func(*state.Volume) error {
	return func(v *state.Volume) error {
		return v.AskStage(&state.Stage{
			Path:       path,
			Capability: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"noatime"}},
			Context:    map[string]string{"key": "value"},
		}, time.Now())
	}
}

func published(target string) func(*state.Volume) error {
	return func(v *state.Volume) error {
		return v.AskPublish(&state.Target{
			Path:       target,
			Capability: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4"},
		}, v.Stage.Path, time.Now())
	}
}

func emptied(v *state.Volume) error {
	v.Stage, v.Targets = nil, nil
	return nil
}

func accepted(v *state.Volume) error {
	v.Accept(state.StagePart())
	return nil
}

func mustEdit(t testing.TB, s *Store, id string, edit func(*state.Volume) error) *state.Volume {
	t.Helper()
	v, err := s.Edit(id, edit)
	must(t, err)
	return v
}

// text says what is stored of a record.
func text(v *state.Volume) string {
	raw, err := encode(testBoot, v)
	if err != nil {
		return err.Error()
	}
	return string(raw)
}

// idsOf names the records, with a space between them.
func idsOf(s *Store) string {
	var ids []string
	for _, v := range s.List() {
		ids = append(ids, v.ID)
	}
	return strings.Join(ids, " ")
}

func TestEditKeepsRecordsOverReopen(t *testing.T) {
	for title, end := range map[string]func(testing.TB, *Store){"closed": closeStore, "crashed": crash} {
		dir := filepath.Join(t.TempDir(), "new", "state")
		s := openStore(t, dir, testBoot)
		want := map[string]*state.Volume{}
		for _, id := range []string{"b", "a", "π \x00 / odd", strings.Repeat("x", maxIDBytes)} {
			mustEdit(t, s, id, staged("/stage/"+id))
			want[id] = mustEdit(t, s, id, published("/pod/"+id))
		}
		mustEdit(t, s, "gone", staged("/stage/gone"))
		mustEdit(t, s, "gone", emptied)
		end(t, s)
		s = openStore(t, dir, testBoot)
		if list := s.List(); len(list) != len(want) || list[0].ID != "a" || list[1].ID != "b" || len(s.SetAside()) != 0 || s.Get("gone") != nil {
			t.Fatalf("%s: the list is %v, not all records by id; set aside %q", title, list, s.SetAside())
		}
		for id, v := range want {
			if got := s.Get(id); text(got) != text(v) {
				t.Errorf("%s: volume %q is %+v after reopening, was %+v", title, id, got, v)
			}
		}
		if v := mustEdit(t, s, "b", accepted); v.Revision <= want["b"].Revision {
			t.Errorf("%s: revision %d after reopening is not later than %d", title, v.Revision, want["b"].Revision)
		}
		for name, mode := range map[string]os.FileMode{dir: os.ModeDir | 0o750, filepath.Join(dir, Directory): os.ModeDir | 0o700, fileOf(dir, "a"): 0o600} {
			if info, err := os.Stat(name); err != nil || info.Mode() != mode {
				t.Errorf("%s: %v has not mode %s (%v)", name, info.Mode(), mode, err)
			}
		}
	}
}

func TestEditOutcomes(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	first := mustEdit(t, s, "v", func(v *state.Volume) error {
		if v.ID != "v" || v.Revision == 0 || v.Targets == nil || !v.Empty() {
			t.Errorf("a fresh record is %+v", v)
		}
		return staged("/stage")(v)
	})
	if first.Revision == 0 || first.Stage.Revision != first.Revision {
		t.Errorf("the intent has revision %d, the record %d", first.Stage.Revision, first.Revision)
	}

	refusal := state.Errorf(state.AlreadyExists, "no")
	if _, err := s.Edit("v", func(v *state.Volume) error {
		v.Stage.Path, v.Stage.Context["key"], v.Stage.Capability.Flags[0] = "/elsewhere", "x", "x"
		return refusal
	}); err != refusal {
		t.Errorf("the edit's error came back as %v", err)
	}
	if got := s.Get("v"); text(got) != text(first) {
		t.Errorf("a refused edit changed the record to %+v", got)
	}

	again := mustEdit(t, s, "v", func(v *state.Volume) error {
		v.Stage.Asked = true
		return staged("/stage")(v)
	})
	if !reflect.DeepEqual(again, s.Get("v")) || again.Revision != first.Revision || again.Stage.Asked {
		t.Errorf("an edit that changed nothing returned %+v, the record is %+v", again, first)
	}

	kept := mustEdit(t, s, "v", published("/pod"))
	for _, copied := range []*state.Volume{kept, s.Get("v"), s.List()[0]} {
		copied.Stage.Context["key"], copied.Targets["/pod"].Path = "mine", "mine"
	}
	if got := s.Get("v"); got.Stage.Context["key"] != "value" || got.Targets["/pod"].Path != "/pod" {
		t.Errorf("the caller's copy is shared with the store: %+v", got)
	}
	renamed := mustEdit(t, s, "v", func(v *state.Volume) error { v.ID, v.Revision = "w", 1; v.Stage.Path = "/s"; return nil })
	if renamed.ID != "v" || renamed.Revision <= kept.Revision || s.Get("w") != nil {
		t.Errorf("an edit chose its own id or revision: %+v", renamed)
	}

	before := mustEdit(t, s, "v", func(v *state.Volume) error { return v.AskSize(1<<30, 0, time.Now()) })
	gone := mustEdit(t, s, "v", emptied)
	if !gone.Empty() || gone.Size != nil || gone.ID != "v" || gone.Revision <= before.Revision || s.Get("v") != nil || len(s.List()) != 0 {
		t.Errorf("the deleted record came back as %+v, there are %v", gone, s.List())
	}
	if v := mustEdit(t, s, "v", emptied); v.Revision != 0 || !v.Empty() || v.Targets == nil {
		t.Errorf("emptying what is empty returned %+v", v)
	}
	if v := mustEdit(t, s, "v", staged("/stage")); v.Revision <= gone.Revision {
		t.Errorf("revision %d after %d", v.Revision, gone.Revision)
	}
	for _, id := range []string{"", "\xff", strings.Repeat("x", maxIDBytes+1)} {
		if _, err := s.Edit(id, staged("/stage")); state.ClassOf(err) != state.InvalidArgument {
			t.Errorf("id %.9q: %v", id, err)
		}
	}
	if v, err := s.Edit("far", func(v *state.Volume) error {
		v.Stage = &state.Stage{Intent: state.Intent{Since: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}}
		return nil
	}); err == nil || s.Get("far") != nil {
		t.Errorf("what cannot be encoded: %+v, %v", v, err)
	}
}

func TestEditsAreAtomic(t *testing.T) {
	const writers, edits = 32, 8
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "same", staged("/same"))
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			own, last := fmt.Sprint("own-", w), uint64(0)
			for n := range edits {
				for _, id := range []string{"same", own} {
					target := fmt.Sprintf("/pod/%s/%d/%d", id, w, n)
					v, err := s.Edit(id, func(v *state.Volume) error {
						if v.Stage == nil {
							v.Stage = &state.Stage{Path: "/" + id}
						}
						v.Targets[target] = &state.Target{Path: target, Intent: state.Intent{Revision: v.Revision}}
						return nil
					})
					if err != nil {
						t.Error(err)
						return
					}
					if v.Revision <= last || v.Targets[target].Revision != v.Revision || s.Get(id).Revision < v.Revision {
						t.Errorf("volume %s: revision %d after %d, read %d", id, v.Revision, last, s.Get(id).Revision)
					}
					last = v.Revision
				}
				mustEdit(t, s, "passing-"+own, staged("/passing/"+own))
				mustEdit(t, s, "passing-"+own, emptied)
				s.List()
			}
		})
	}
	wg.Wait()
	crash(t, s)
	s = openStore(t, dir, testBoot)
	if n := len(s.Get("same").Targets); n != writers*edits || len(s.List()) != writers+1 {
		t.Errorf("%d of %d concurrent edits of one volume are there, and %d records", n, writers*edits, len(s.List()))
	}
	for w := range writers {
		if n := len(s.Get(fmt.Sprint("own-", w)).Targets); n != edits {
			t.Errorf("writer %d: %d of %d edits are there", w, n, edits)
		}
	}
}

// An edit that takes long holds up no other volume.
func TestEditsWaitForNothingInCommon(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	begun, go_ := make(chan struct{}), make(chan struct{})
	done := make(chan error)
	go func() {
		_, err := s.Edit("slow", func(v *state.Volume) error {
			close(begun)
			<-go_
			return staged("/slow")(v)
		})
		done <- err
	}()
	<-begun
	mustEdit(t, s, "v", staged("/stage"))
	if s.Get("slow") != nil || idsOf(s) != "v" {
		t.Error("an edit is seen before its end")
	}
	close(go_)
	must(t, <-done)
}

func TestCloseEndsEdits(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			for n := 0; ; n++ {
				if _, err := s.Edit(fmt.Sprint(w), staged(fmt.Sprint("/", w, "/", n))); errors.Is(err, errClosed) {
					return
				} else if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	closeStore(t, s)
	wg.Wait()
	closeStore(t, s)
	if _, err := s.Edit("0", emptied); !errors.Is(err, errClosed) {
		t.Errorf("a removal: %v", err)
	}
}

func TestAnotherBootDropsRecords(t *testing.T) {
	for title, end := range map[string]func(testing.TB, *Store){"closed": closeStore, "crashed": crash} {
		dir := t.TempDir()
		s := openStore(t, dir, testBoot)
		before := mustEdit(t, s, "v", staged("/stage"))
		end(t, s)
		s = openStore(t, dir, "boot-2")
		if after := mustEdit(t, s, "w", staged("/other")); after.Revision <= before.Revision || idsOf(s) != "w" {
			t.Errorf("%s: revision %d after %d, there are %s", title, after.Revision, before.Revision, idsOf(s))
		}
		end(t, s)
		if s = openStore(t, dir, testBoot); idsOf(s) != "" {
			t.Errorf("%s: in the first boot there are %v", title, s.List())
		}
	}
}

func TestOpenReadOnly(t *testing.T) {
	bootID, err := boot.ID()
	must(t, err)
	dir := t.TempDir()
	readOnly := func(want string) *Store {
		t.Helper()
		before := tree(t, dir)
		r, err := OpenReadOnly(t.Context(), dir)
		must(t, err)
		if idsOf(r) != want || tree(t, dir) != before {
			t.Errorf("reads %s, not %s; there is\n%s, was\n%s", idsOf(r), want, tree(t, dir), before)
		}
		return r
	}
	readOnly("")
	s := openStore(t, dir, bootID)
	want := mustEdit(t, s, "v", staged("/stage"))
	if _, err := OpenReadOnly(t.Context(), dir); !errors.Is(err, ErrLocked) {
		t.Errorf("a store in use: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := OpenReadOnly(ctx, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	closeStore(t, s)
	r := readOnly("v")
	if got := r.Get("v"); text(got) != text(want) {
		t.Errorf("reads %+v, not %+v", got, want)
	}
	if _, err := r.Edit("v", emptied); err == nil {
		t.Error("a read-only store took an edit")
	}
	must(t, os.WriteFile(fileOf(dir, "bad"), []byte("{}"), 0o600))
	readOnly("v")
	s = openStore(t, dir, "another boot") // not kept out by r
	mustEdit(t, s, "v", staged("/stage"))
	closeStore(t, r)
	closeStore(t, s)
	readOnly("")
}

// tree says what is in a directory.
func tree(t *testing.T, dir string) string {
	var all strings.Builder
	must(t, filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			fmt.Fprintln(&all, path)
			return err
		}
		raw, err := os.ReadFile(path)
		fmt.Fprintf(&all, "%s %q\n", path, raw)
		return err
	}))
	return all.String()
}

func TestShownAs(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	number := func(minor uint32) state.DeviceNumber { return state.DeviceNumber{Major: 7, Minor: minor} }
	show := func(id string, minor uint32) {
		mustEdit(t, s, id, func(v *state.Volume) error {
			if err := v.AskUnpublish("/pod/"+id, time.Now()); err != nil {
				return err
			}
			v.Targets["/pod/"+id].Device = number(minor)
			return nil
		})
	}
	show("v", 3)
	show("w", 3)
	show("w", 4)
	show("x", 0)
	mustEdit(t, s, "x", emptied)
	mustEdit(t, s, "without", staged("/stage"))
	for minor, want := range map[uint32]string{3: "v", 4: "w", 5: "", 0: ""} {
		if got := s.ShownAs(number(minor)); got != want {
			t.Errorf("%q is shown as %d, want %q", got, minor, want)
		}
	}
	if got := s.ShownAs(state.DeviceNumber{}); got != "" {
		t.Errorf("%q is shown as no device", got)
	}
}

func TestBootID(t *testing.T) {
	if a, err := boot.ID(); err != nil || len(a) != 36 {
		t.Errorf("boot id %q: %v", a, err)
	}
}

// logged is a log that is kept.
type logged struct {
	testing.TB
	mu    sync.Mutex
	lines []string
	line  chan struct{} // has a token when there is a new line
}

func (l *logged) Log(args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprint(args...))
	select {
	case l.line <- struct{}{}:
	default:
	}
}

func (l *logged) has(words string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(strings.Join(l.lines, "\n"), words)
}

// logs returns a context whose logger keeps what it is told.
func logs(t testing.TB) (context.Context, *logged) {
	l := &logged{TB: t, line: make(chan struct{}, 1)}
	return klog.NewContext(t.Context(), ktesting.NewLogger(l, ktesting.NewConfig())), l
}

// mountAt mounts a file system at a directory of its own.
func mountAt(t *testing.T, fsType, options string) string {
	t.Helper()
	machine.Kernel(t)
	dir := t.TempDir()
	must(t, syscall.Mount(fsType, dir, fsType, 0, options))
	t.Cleanup(func() { must(t, syscall.Unmount(dir, syscall.MNT_DETACH)) })
	return dir
}

func TestPlaceOfTheStore(t *testing.T) {
	lower := t.TempDir()
	overlay := mountAt(t, "overlay", fmt.Sprintf("lowerdir=%s:%s", lower, t.TempDir()))
	if err := checkPlace(t.Context(), overlay); err == nil || !strings.Contains(err.Error(), overlay) || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("on an overlay: %v", err)
	}
	for dir, warns := range map[string]bool{mountAt(t, "tmpfs", "size=64k"): false, "/proc": true} {
		ctx, log := logs(t)
		if err := checkPlace(ctx, dir); err != nil || log.has("on no tmpfs") != warns {
			t.Errorf("%s: %v, %q", dir, err, log.lines)
		}
	}
}

func TestOpenFailsFast(t *testing.T) {
	for _, kind := range []string{"state directory", Directory, "intents.db"} {
		dir := t.TempDir()
		state, want := dir, "no directory"
		switch kind {
		case "state directory":
			state, want = filepath.Join(dir, "file"), "not a directory"
			must(t, os.WriteFile(state, nil, 0o600))
		case Directory:
			must(t, syscall.Mkfifo(filepath.Join(dir, kind), 0o600))
		default:
			must(t, os.Mkdir(filepath.Join(dir, kind), 0o700))
			want = "no regular file"
		}
		if _, err := Open(t.Context(), state, testBoot); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), state) {
			t.Errorf("a wrong %s: %v", kind, err)
		}
		if _, err := OpenReadOnly(t.Context(), state); err == nil {
			t.Errorf("a wrong %s was opened for reading", kind)
		}
	}
}
