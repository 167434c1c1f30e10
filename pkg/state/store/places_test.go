package store

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

// askedAt returns an edit that asks for a stage, a target, or for the end of one.
func askedAt(what, path string) func(*state.Volume) error {
	switch what {
	case "stage":
		return staged(path)
	case "publish":
		return published(path)
	case "unstage":
		return func(v *state.Volume) error { return v.AskUnstage(path, time.Now()) }
	}
	return func(v *state.Volume) error { return v.AskUnpublish(path, time.Now()) }
}

// A refusal names the volume that is in the way, where it is, and what to do. When
// there is one, see TestIndexesAgreeWithAWalk.
func TestPathsOfVolumesLieApart(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	inUse(t, s, "other")
	inUse(t, s, "going")
	mustEdit(t, s, "going", askedAt("unpublish", "/pod/going"))
	mustEdit(t, s, "unstaged", askedAt("unstage", "/stage/unstaged"))
	mustEdit(t, s, "v", staged("/stage/v"))
	for _, row := range []struct {
		what, path string
		class      state.Class
		words      string
	}{
		{"publish", "/pod/other", state.FailedPrecondition, "volume other is published at the same path"},
		{"publish", "/pod/other/in/it", state.FailedPrecondition, "volume other is published at /pod/other, which lies above it"},
		{"publish", "/stage/other", state.FailedPrecondition, "volume other is staged at the same path"},
		{"stage", "/pod/other/in", state.FailedPrecondition, "end that by NodeUnpublishVolume"},
		{"stage", "/stage/other/in", state.FailedPrecondition, "end that by NodeUnstageVolume"},
		{"stage", "/stage", state.FailedPrecondition, "which lies below it"},
		{"stage", "/pod", state.FailedPrecondition, "volume other"}, // one that stays tells more than one that goes
		{"publish", "/pod/going/in", state.Aborted, "volume going is still being unpublished from /pod/going"},
		{"stage", "/stage/unstaged/in", state.Aborted, "volume unstaged is still being unstaged from"},
	} {
		id := "v"
		if row.what == "stage" {
			id = "new"
		}
		_, err := s.Edit(id, askedAt(row.what, row.path))
		if state.ClassOf(err) != row.class || !strings.Contains(fmt.Sprint(err), row.words) || !strings.Contains(err.Error(), row.path) {
			t.Errorf("%s at %s: %v, want %s and %q", row.what, row.path, err, row.class, row.words)
		}
	}
}

// Of two calls at once for paths of which one lies in the other, one is refused.
func TestPathsOfConcurrentEdits(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	for round := range 200 {
		var group sync.WaitGroup
		errs := make([]error, 2)
		for i, path := range []string{fmt.Sprintf("/k/%d", round), fmt.Sprintf("/k/%d/in", round)} {
			group.Go(func() {
				_, errs[i] = s.Edit(fmt.Sprintf("%d-%d", round, i), staged(path))
			})
		}
		group.Wait()
		if (errs[0] == nil) == (errs[1] == nil) {
			t.Fatalf("both or none: %v, %v", errs[0], errs[1])
		}
	}
}

// The indexes of paths and of device numbers say what a walk over all records says,
// after edits that were refused, or not written, and after a restart, too.
func TestIndexesAgreeWithAWalk(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	name := func() string { return string(rune('a' + random.IntN(3))) }
	s := openStore(t, onTmpfs(t), testBoot)
	refusals := map[state.Class]int{}
	for n := range 20000 {
		id, where := name(), "/"+name()
		for random.IntN(3) > 0 {
			where += "/" + name()
		}
		before := cmp.Or(s.Get(id), &state.Volume{ID: id})
		intent := state.Intent{Gone: random.IntN(2) == 0, Accepted: random.IntN(3) > 0}
		var want state.Class
		fails := false
		_, err := s.Edit(id, func(v *state.Volume) error {
			switch random.IntN(4) {
			case 0:
				v.Stage = &state.Stage{Path: where, Intent: intent}
			case 1:
				number := uint32(random.IntN(4)) // 0 is none
				v.Targets[where] = &state.Target{Path: where, Intent: intent}
				v.Targets[where].Device = state.DeviceNumber{Major: number, Minor: number}
			case 2:
				v.Stage = nil
			case 3:
				clear(v.Targets)
			}
			if fails = !v.Empty() && random.IntN(8) == 0; fails {
				v.Size = &state.Size{Intent: state.Intent{Since: time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC)}} // cannot be encoded
			}
			want = walk(s.records(), before, v)
			return nil
		})
		if (err != nil) != (fails || want != 0) || err != nil && (state.ClassOf(err) != want || text(cmp.Or(s.Get(id), &state.Volume{ID: id})) != text(before)) {
			t.Fatalf("%v, a walk over all says %s; it cannot be written: %t", err, want, fails)
		}
		refusals[want]++
		for number := range uint32(4) {
			number := state.DeviceNumber{Major: number, Minor: number}
			shown := slices.Collect(maps.Keys(s.records()))
			shown = slices.DeleteFunc(shown, func(id string) bool { return !slices.Contains(numbersOf(s.Get(id)), number) })
			if got := s.VolumeOfDevice(number); len(shown) == 0 && got != "" || len(shown) > 0 && !slices.Contains(shown, got) {
				t.Fatalf("%q is shown as %s, a walk over all says %q", got, number, shown)
			}
		}
		if n%1000 == 0 {
			s = reopen(t, s, testBoot)
		}
	}
	if refusals[state.Aborted] < 100 || refusals[state.FailedPrecondition] < 100 {
		t.Errorf("refused only %v", refusals)
	}
	for id := range s.records() {
		mustEdit(t, s, id, emptied)
	}
	if len(s.places.at) > 0 || len(s.places.below) > 0 || len(s.byDevice) > 0 {
		t.Errorf("of nothing is left: %v, %v, %v", s.places.at, s.places.below, s.byDevice)
	}
}

// walk is the rule for paths without an index; Unavailable, the zero Class, is no refusal.
func walk(records map[string]*state.Volume, before, after *state.Volume) (class state.Class) {
	for _, asked := range difference(after, before) {
		was := before.Intent(asked.part)
		for _, v := range records {
			for _, o := range occupants(v) {
				itself := o.volume == asked.volume && o.part == asked.part
				near := strings.HasPrefix(asked.path+"/", o.path+"/") || strings.HasPrefix(o.path+"/", asked.path+"/")
				if asked.gone || itself || !near || class == state.FailedPrecondition {
					continue
				}
				if class = state.Aborted; !o.gone && (was == nil || was.Gone || was.Accepted) {
					class = state.FailedPrecondition
				}
			}
		}
	}
	return class
}

// Records of older versions have paths as they were asked.
func TestRewritePaths(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	for _, edit := range []func(*state.Volume) error{
		staged("/link/s"), published("/link/pod"), published("/real/pod-2"), published("/link/pod-3"),
		askedAt("unpublish", "/real/pod"), // that of /link/pod, asked for later
		func(v *state.Volume) error { v.Stage.Inline = &state.Inline{Target: "/link/pod-3"}; return nil },
	} {
		mustEdit(t, s, "v", edit)
	}
	s = reopen(t, s, testBoot)
	s.RewritePaths(func(path string) string { return strings.Replace(path, "/link/", "/real/", 1) })
	v := s.Get("v")
	if v.Stage.Path != "/real/s" || v.Stage.Inline.Target != "/real/pod-3" || len(v.Targets) != 3 || !v.Targets["/real/pod"].Gone || v.Targets["/real/pod-2"].Gone || v.Targets["/real/pod-3"].Path != "/real/pod-3" {
		t.Errorf("%s", text(v))
	}
	if _, err := s.Edit("w", staged("/real/s/in")); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("in a stage that was named otherwise: %v", err)
	}
	want := text(mustEdit(t, s, "v", askedAt("unpublish", "/real/pod-2")))
	if s = reopen(t, s, testBoot); text(s.Get("v")) != want {
		t.Errorf("after the next edit the disk has %s, not %s", text(s.Get("v")), want)
	}
}
