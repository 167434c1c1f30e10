package store

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-logr/logr"
	"github.com/go-logr/logr/funcr"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/internal/boot"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

const testBoot = "boot-1"

var must = require.NoError

// openStore opens a store, and logs nothing of what is damaged in it.
func openStore(t testing.TB, dir, bootID string) *Store {
	t.Helper()
	s, err := Open(klog.NewContext(t.Context(), logr.Discard()), dir, bootID)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// reopen opens a store that was ended as a kill ends it: Close writes nothing.
func reopen(t testing.TB, s *Store, bootID string) *Store {
	t.Helper()
	must(t, s.Close())
	return openStore(t, filepath.Dir(s.path), bootID)
}

// fileOf returns the path of a volume's file.
func fileOf(dir, id string) string { return filepath.Join(dir, Directory, fileName(id)) }

// asides returns the files that were set aside in a state directory.
func asides(t testing.TB, dir string) []string {
	t.Helper()
	beside, err := filepath.Glob(filepath.Join(dir, "*.corrupt-*"))
	must(t, err)
	within, err := filepath.Glob(filepath.Join(dir, Directory, "*.corrupt-*"))
	must(t, err)
	return append(beside, within...)
}

var asExt4 = state.Capability{
	Access: state.MountAccess, Mode: "SINGLE_NODE_MULTI_WRITER", FSType: "ext4", Flags: []string{"noatime"},
}

// staged returns an edit that stages the volume at path, published one that publishes
// it, unpublished and unstaged ones that ask for the end, and emptied leaves nothing.
func staged(path string) func(*state.Volume) error {
	return func(v *state.Volume) error {
		return v.AskStage(&state.Stage{Path: path, Capability: asExt4, Context: map[string]string{"key": "value"}}, time.Now())
	}
}

func published(target string) func(*state.Volume) error {
	return func(v *state.Volume) error {
		return v.AskPublish(&state.Target{Path: target, Capability: asExt4}, v.Stage.Path, time.Now())
	}
}

func unpublished(target string) func(*state.Volume) error {
	return func(v *state.Volume) error { return v.AskUnpublish(target, time.Now()) }
}

func unstaged(path string) func(*state.Volume) error {
	return func(v *state.Volume) error { return v.AskUnstage(path, time.Now()) }
}

func emptied(v *state.Volume) error {
	v.Stage, v.Targets = nil, nil
	return nil
}

// toggled changes something with each edit.
func toggled(v *state.Volume) error {
	if v.Stage == nil {
		return staged(fmt.Sprintf("/var/lib/kubelet/plugins/kubernetes.io/csi/csi-node/%064s/globalmount", v.ID))(v)
	}
	v.Stage.Accepted = !v.Stage.Accepted
	return nil
}

func mustEdit(t testing.TB, s *Store, id string, edit func(*state.Volume) error) *state.Volume {
	t.Helper()
	v, err := s.Edit(id, edit)
	must(t, err)
	return v
}

// text says what is stored of a record, which can be encoded.
func text(v *state.Volume) string {
	raw, _ := encode(testBoot, v)
	return string(raw)
}

// idsOf names the records, with a space between them.
func idsOf(s *Store) string { return ids(s.records()) }

func ids(records map[string]*state.Volume) string {
	return strings.Join(slices.Sorted(maps.Keys(records)), " ")
}

// Records are there again after a restart, and not after a reboot. Revisions rise.
func TestRestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "new", "state")
	s := openStore(t, dir, testBoot)
	want := map[string]*state.Volume{}
	for _, id := range []string{"b", "a", "π \x00 / odd", strings.Repeat("x", maxIDBytes)} {
		mustEdit(t, s, id, staged("/stage/"+id))
		want[id] = mustEdit(t, s, id, published("/pod/"+id))
	}
	mustEdit(t, s, "gone", staged("/stage/gone"))
	mustEdit(t, s, "gone", emptied)
	s = reopen(t, s, testBoot)
	if list := s.List(); len(list) != len(want) || list[0].ID != "a" || list[1].ID != "b" || len(asides(t, dir)) != 0 || s.Get("gone") != nil {
		t.Fatalf("the list is %v, not all records by id; set aside %q", list, asides(t, dir))
	}
	for id, v := range want {
		if got := s.Get(id); text(got) != text(v) {
			t.Errorf("volume %q is %+v after reopening, was %+v", id, got, v)
		}
	}
	last := mustEdit(t, s, "b", toggled)
	for name, mode := range map[string]os.FileMode{dir: os.ModeDir | 0o750, s.path: os.ModeDir | 0o700, fileOf(dir, "a"): 0o600} {
		if info, err := os.Stat(name); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v has not mode %s (%v)", name, info.Mode(), mode, err)
		}
	}
	s = reopen(t, s, "boot-2")
	v := mustEdit(t, s, "new", staged("/stage"))
	if was := want["b"].Revision; last.Revision <= was || v.Revision <= last.Revision || idsOf(s) != "new" {
		t.Errorf("revision %d came after %d, and %d after a reboot; there are %s", last.Revision, was, v.Revision, idsOf(s))
	}
	if s = reopen(t, s, testBoot); idsOf(s) != "" {
		t.Errorf("in the first boot again there are %s", idsOf(s))
	}
}

func TestEditOutcomes(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	first := mustEdit(t, s, "v", func(v *state.Volume) error {
		if v.ID != "v" || v.Revision == 0 || v.Targets == nil || !v.Empty() {
			t.Errorf("a fresh record is %+v", v)
		}
		mustEdit(t, s, "another", staged("/another")) // which does not wait
		if s.Get("v") != nil || idsOf(s) != "another" {
			t.Error("an edit is seen before its end")
		}
		return staged("/stage")(v)
	})
	mustEdit(t, s, "another", emptied)
	if first.Stage.Revision != first.Revision {
		t.Errorf("the intent has revision %d, the record %d", first.Stage.Revision, first.Revision)
	}

	refusal := state.Errorf(state.AlreadyExists, "no")
	if _, err := s.Edit("v", func(v *state.Volume) error {
		v.Stage.Path, v.Stage.Context["key"], v.Stage.Capability.Flags[0] = "/elsewhere", "x", "x"
		return refusal
	}); err != refusal || text(s.Get("v")) != text(first) {
		t.Errorf("the edit's error came back as %v, and there is %+v", err, s.Get("v"))
	}

	again := mustEdit(t, s, "v", func(v *state.Volume) error {
		v.Stage.CallerWaits = true
		return staged("/stage")(v)
	})
	if !reflect.DeepEqual(again, s.Get("v")) || again.Revision != first.Revision || again.Stage.CallerWaits {
		t.Errorf("an edit that changed nothing returned %+v, the record is %+v", again, first)
	}

	kept := mustEdit(t, s, "v", published("/pod"))
	before := text(kept)
	if s.Get("v") != kept || s.List()[0] != kept {
		t.Error("not everybody gets the same record")
	}
	var inEdit *state.Volume
	mustEdit(t, s, "v", func(v *state.Volume) error {
		inEdit = v
		return published("/pod-2")(v)
	})
	inEdit.Stage.Context["key"], inEdit.Targets["/pod"].Path = "mine", "mine"
	if got := s.Get("v"); text(kept) != before || got.Stage.Context["key"] != "value" || got.Targets["/pod"].Path != "/pod" {
		t.Errorf("a record was changed in place: %s, and %s, which was %s", text(got), text(kept), before)
	}
	renamed := mustEdit(t, s, "v", func(v *state.Volume) error { v.ID, v.Revision = "w", 1; v.Stage.Path = "/s"; return nil })
	if renamed.ID != "v" || renamed.Revision <= kept.Revision || s.Get("w") != nil {
		t.Errorf("an edit chose its own id or revision: %+v", renamed)
	}

	sized := mustEdit(t, s, "v", func(v *state.Volume) error { return v.AskSize(1<<30, 0, time.Now()) })
	gone := mustEdit(t, s, "v", emptied)
	if !gone.Empty() || gone.Size != nil || gone.ID != "v" || gone.Revision <= sized.Revision || s.Get("v") != nil || len(s.List()) != 0 {
		t.Errorf("the deleted record came back as %+v, there are %v", gone, s.List())
	}
	if v := mustEdit(t, s, "v", emptied); v.Revision != 0 || !v.Empty() || v.Targets == nil {
		t.Errorf("emptying what is empty returned %+v", v)
	}
	for _, id := range []string{"", "\xff", strings.Repeat("x", maxIDBytes+1)} {
		_, err := s.Edit(id, staged("/stage"))
		require.Class(t, err, state.InvalidArgument, "volume id")
	}
}

// A proposal is seen at once, has its place, and is written with the next edit, or by Flush.
func TestProposal(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	propose := func(edit func(*state.Volume) error) *state.Volume {
		t.Helper()
		v, err := s.Propose("v", edit)
		must(t, err)
		if text(s.Get("v")) != text(v) {
			t.Errorf("%s was proposed, and there is %s", text(v), text(s.Get("v")))
		}
		return v
	}
	onDisk := func(want *state.Volume) {
		t.Helper()
		c, err := read(filepath.Join(dir, Directory), testBoot)
		must(t, err)
		if is := c.records["v"]; is == nil != (want == nil) || want != nil && text(is) != text(want) {
			t.Errorf("a crash would leave %+v, want %+v", is, want)
		}
	}
	first := propose(staged("/stage"))
	onDisk(nil)
	if again := propose(staged("/stage")); again.Revision != first.Revision {
		t.Errorf("the same proposal has the revision %d after %d", again.Revision, first.Revision)
	}
	_, err := s.Edit("w", staged("/stage/in"))
	require.Class(t, err, state.FailedPrecondition, "/stage")
	for range 2 {
		must(t, s.Flush("v"))
		onDisk(first)
	}
	propose(published("/pod"))
	onDisk(first)
	onDisk(first)
	accepted := mustEdit(t, s, "v", func(v *state.Volume) error { v.Stage.Accepted = true; return nil })
	if onDisk(accepted); accepted.Targets["/pod"] == nil {
		t.Error("the edit after a proposal lacks it")
	}
	propose(unpublished("/pod"))
	s = reopen(t, s, testBoot) // a crash would do the same
	if text(s.Get("v")) != text(accepted) {
		t.Errorf("after what was proposed only there is %s", text(s.Get("v")))
	}
	mustEdit(t, s, "v", emptied)
	onDisk(nil)
	propose(staged("/stage"))
	mustEdit(t, s, "v", emptied)
	onDisk(nil)
	must(t, s.Flush("v"))
	must(t, s.Close())
	if _, err := s.Propose("v", staged("/stage")); !errors.Is(err, errClosed) {
		t.Errorf("proposed to a closed store: %v", err)
	}
}

// Whatever Edit has returned is there, in the order of the revisions, also after
// Close, which ends the edits under way.
func TestEditsAreAtomic(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	var group sync.WaitGroup
	var edits [4]atomic.Int64 // of each volume
	for writer := range 32 {
		volume := writer % len(edits)
		id := fmt.Sprint(volume)
		group.Go(func() {
			for n, last := 0, uint64(0); ; n++ {
				target := fmt.Sprintf("/pod/%d/%d", writer, n)
				v, err := s.Edit(id, func(v *state.Volume) error {
					v.Targets[target] = &state.Target{Path: target, Intent: state.Intent{Revision: v.Revision}}
					return nil
				})
				if errors.Is(err, errClosed) {
					return
				}
				if err != nil || v.Revision <= last || v.Targets[target].Revision != v.Revision || s.Get(id).Revision < v.Revision {
					t.Errorf("volume %s: after revision %d there came %+v (%v)", id, last, v, err)
					return
				}
				last = v.Revision
				edits[volume].Add(1)
				if s.List(); n == 8 && writer == 0 {
					must(t, s.Close())
				}
			}
		})
	}
	group.Wait()
	s = reopen(t, s, testBoot)
	for volume := range edits {
		if v, n := s.Get(fmt.Sprint(volume)), int(edits[volume].Load()); v == nil && n > 0 || v != nil && len(v.Targets) != n {
			t.Errorf("volume %d: %d edits have returned, there is %+v", volume, n, v)
		}
	}
}

// Whatever becomes of the files while the plugin runs, nothing is forgotten.
func TestFilesLostWhileOpen(t *testing.T) {
	for name, harm := range map[string]func(dir string) error{
		"a file":    func(dir string) error { return os.Remove(fileOf(dir, "b")) },
		"all files": func(dir string) error { return os.RemoveAll(filepath.Join(dir, Directory)) },
		"all moved": func(dir string) error {
			return os.Rename(filepath.Join(dir, Directory), dir+".moved-"+fmt.Sprint(time.Now().UnixNano()))
		},
		"state directory": os.RemoveAll,
		"the lock":        func(dir string) error { return os.Remove(filepath.Join(dir, lockName)) },
		"damaged":         func(dir string) error { return os.WriteFile(fileOf(dir, "b"), []byte("garbage"), 0o600) },
		"replaced": func(dir string) error {
			return errors.Join(os.RemoveAll(filepath.Join(dir, Directory)), os.MkdirAll(fileOf(dir, "c"), 0o700))
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "state")
			s := openStore(t, dir, testBoot)
			mustEdit(t, s, "a", toggled)
			for range 2 {
				mustEdit(t, s, "b", toggled)
				mustEdit(t, s, "gone", toggled)
				must(t, harm(dir))
				var group sync.WaitGroup
				for id, edit := range map[string]func(*state.Volume) error{"b": toggled, "c": toggled, "gone": emptied} {
					group.Go(func() { mustEdit(t, s, id, edit) })
				}
				group.Wait()
			}
			if s = reopen(t, s, testBoot); idsOf(s) != "a b c" || len(asides(t, dir)) > 0 {
				t.Errorf("after it was opened again there are the records %s, set aside %q", idsOf(s), asides(t, dir))
			}
			if names, err := filepath.Glob(filepath.Join(dir, "*")); err != nil || len(names) != 2 {
				t.Errorf("left %q (%v)", names, err)
			}
		})
	}
}

// Two plugins on one state directory: the one whose files were deleted does not
// take the other's.
func TestFilesLostToAnother(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "a", staged("/stage/a"))
	must(t, os.RemoveAll(filepath.Join(dir, Directory)))
	must(t, os.Remove(s.lockPath()))
	other := openStore(t, dir, testBoot)
	mustEdit(t, other, "x", staged("/stage/x"))
	if _, err := s.Edit("b", staged("/stage/b")); err == nil || !strings.Contains(err.Error(), "another process") {
		t.Errorf("edited: %v", err)
	}
	if idsOf(s) != "a" || idsOf(other) != "x" || left(t, dir) != "x" {
		t.Errorf("records were mixed up: %s, %s, %s", idsOf(s), idsOf(other), left(t, dir))
	}
}

func TestOpenReadOnly(t *testing.T) {
	bootID, err := boot.ID()
	must(t, err)
	dir := t.TempDir()
	readOnly := func(want string) *Store {
		t.Helper()
		before := listed(t, dir)
		r, err := OpenReadOnly(t.Context(), dir)
		must(t, err)
		if idsOf(r) != want || listed(t, dir) != before {
			t.Errorf("reads %s, not %s; there is\n%s, was\n%s", idsOf(r), want, listed(t, dir), before)
		}
		return r
	}
	readOnly("")
	s := openStore(t, dir, bootID)
	want := text(mustEdit(t, s, "v", staged("/stage")))
	if _, err := OpenReadOnly(t.Context(), dir); !errors.Is(err, ErrLocked) {
		t.Errorf("a store in use: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := OpenReadOnly(ctx, dir); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	must(t, s.Close())
	must(t, os.WriteFile(fileOf(dir, "bad"), []byte("{}"), 0o600))
	r := readOnly("v")
	if _, err := r.Edit("v", emptied); !errors.Is(err, errClosed) || text(r.Get("v")) != want {
		t.Errorf("edited: %v; there is %s", err, text(r.Get("v")))
	}
	s = openStore(t, dir, "another boot") // not kept out by r
	mustEdit(t, s, "v", staged("/stage"))
	must(t, s.Close())
	readOnly("")
}

// listed tells the files in a directory, and when each was written.
func listed(t *testing.T, dir string) string {
	t.Helper()
	list, err := exec.Command("ls", "-liR", "--full-time", dir).Output()
	must(t, err)
	return string(list)
}

// logTo returns a context whose logger sends what it is told.
func logTo(t testing.TB, log chan<- string) context.Context {
	return klog.NewContext(t.Context(), funcr.New(func(_, words string) { log <- words }, funcr.Options{}))
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
		log := make(chan string, 1)
		if err := checkPlace(logTo(t, log), dir); err != nil || (len(log) > 0) != warns {
			t.Errorf("%s: %v, it warns: %t", dir, err, !warns)
		}
	}
}

// What is in the way is an error at once, even a pipe, for which who opens it may wait.
func TestOpenFailsFast(t *testing.T) {
	for _, name := range []string{Directory, lockName} {
		dir := t.TempDir()
		must(t, syscall.Mkfifo(filepath.Join(dir, name), 0o600))
		if _, err := Open(t.Context(), dir, testBoot); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("a wrong %s: %v", name, err)
		}
		if _, err := OpenReadOnly(t.Context(), dir); err == nil {
			t.Errorf("a wrong %s was opened for reading", name)
		}
	}
}
