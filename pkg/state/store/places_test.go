package store

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// A refusal names the volume that is in the way, where it is, and what to do. When
// there is one, see TestIndexesAgreeWithAWalk.
func TestPathsOfVolumesLieApart(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	inUse(t, s, "other")
	mustEdit(t, s, "going", staged("/stage/going"))
	mustEdit(t, s, "going", unpublished("/pod/going"))
	mustEdit(t, s, "unstaged", unstaged("/stage/unstaged"))
	for _, row := range []struct {
		path  string
		class state.Class
		words string
	}{
		{"/pod/other", state.FailedPrecondition, "volume other is published at the same path, and two must lie apart: choose another path, or end that by NodeUnpublishVolume"},
		{"/stage/other/in/it", state.FailedPrecondition, "volume other is staged at /stage/other, which lies above it, and two must lie apart: choose another path, or end that by NodeUnstageVolume"},
		{"/pod", state.FailedPrecondition, "volume other is published at /pod/other, which lies below it"}, // one that stays tells more than one that goes
		{"/pod/going/in", state.Aborted, "volume going is still being unpublished from /pod/going"},
		{"/stage/unstaged/in", state.Aborted, "volume unstaged is still being unstaged from"},
	} {
		_, err := s.Edit("v", staged(row.path))
		require.Class(t, err, row.class, "the path "+row.path, row.words)
	}
}

// Of two calls at once for paths of which one lies in the other, one is refused.
func TestPathsOfConcurrentEdits(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	for round := range 200 {
		path, below := fmt.Sprint("/k/", round), make(chan error)
		go func() {
			_, err := s.Edit(path+" below", staged(path+"/below"))
			below <- err
		}()
		_, above := s.Edit(path, staged(path))
		if below := <-below; (above == nil) == (below == nil) {
			t.Fatalf("both or none: %v, %v", above, below)
		}
	}
}

// The indexes of paths and of device numbers say what a walk over all records says,
// after edits that were refused, or not written, and after a restart, too.
func TestIndexesAgreeWithAWalk(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	name := func() string { return string(rune('a' + random.IntN(3))) }
	s := openStore(t, mountAt(t, "tmpfs", ""), testBoot)
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
			var shown []string
			for id, v := range s.records() {
				for _, t := range v.Targets {
					if t.Device == number && number != (state.DeviceNumber{}) {
						shown = append(shown, id)
					}
				}
			}
			if got := s.VolumeOfDevice(number); len(shown) == 0 && got != "" || len(shown) > 0 && !slices.Contains(shown, got) {
				t.Fatalf("%q is shown as %s, a walk over all says %q", got, number, shown)
			}
		}
		for id, v := range s.records() {
			if at := slices.ContainsFunc(occupants(v), func(o occupant) bool { return o.path == where }); s.IsAt(id, where) != at {
				t.Fatalf("%s is at %s: a walk over all says %t", id, where, at)
			}
		}
		for _, path := range []string{where, filepath.Dir(where), "/"} {
			var there []string
			for id, v := range s.records() {
				if slices.ContainsFunc(occupants(v), func(o occupant) bool { return strings.HasPrefix(o.path+"/", strings.TrimSuffix(path, "/")+"/") }) {
					there = append(there, id)
				}
			}
			if got := s.VolumesAt(path); !slices.Equal(slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(there))) {
				t.Fatalf("at %s are %q, a walk over all says %q", path, got, there)
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
	for _, asked := range difference(occupants(after), occupants(before)) {
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
		unpublished("/real/pod"), // that of /link/pod, asked for later
		func(v *state.Volume) error { v.Stage.Inline = &state.Inline{Target: "/link/pod-3"}; return nil },
	} {
		mustEdit(t, s, "v", edit)
	}
	s = reopen(t, s, testBoot)
	s.RewritePaths(func(path string) string { return strings.Replace(path, "/link/", "/real/", 1) })
	if v := s.Get("v"); v.Stage.Path != "/real/s" || v.Stage.Inline.Target != "/real/pod-3" || len(v.Targets) != 3 || !v.Targets["/real/pod"].Gone || v.Targets["/real/pod-2"].Gone || v.Targets["/real/pod-3"].Path != "/real/pod-3" {
		t.Errorf("%s", text(v))
	}
	if _, err := s.Edit("w", staged("/real/s/in")); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("in a stage that was named otherwise: %v", err)
	}
	want := text(mustEdit(t, s, "v", unpublished("/real/pod-2")))
	if s = reopen(t, s, testBoot); text(s.Get("v")) != want {
		t.Errorf("after the next edit the disk has %s, not %s", text(s.Get("v")), want)
	}
}
