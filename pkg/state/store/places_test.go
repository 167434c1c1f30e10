package store

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
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

// Whatever a volume is asked to be at lies apart from where every other one is,
// or is still going from.
func TestPathsOfVolumesLieApart(t *testing.T) {
	s := openStore(t, t.TempDir(), testBoot)
	for _, id := range []string{"other", "going", "v"} {
		mustEdit(t, s, id, staged("/k/stages/"+id+"/globalmount"))
	}
	mustEdit(t, s, "other", published("/k/pods/1/mount"))
	mustEdit(t, s, "going", published("/k/pods/2/mount"))
	mustEdit(t, s, "going", askedAt("unpublish", "/k/pods/2/mount"))
	mustEdit(t, s, "unstaged", askedAt("unstage", "/k/unstaged"))
	for _, row := range []struct {
		what, path string
		class      state.Class
		words      string
	}{
		{"publish", "/k/pods/1/mount", state.FailedPrecondition, "volume other is published at the same path"},
		{"publish", "/k/pods/1/mount/in/it", state.FailedPrecondition, "volume other is published at /k/pods/1/mount, which lies above it"},
		{"publish", "/k/pods/1", state.FailedPrecondition, "volume other is published at /k/pods/1/mount, which lies below it"},
		{"publish", "/k/stages/other/globalmount", state.FailedPrecondition, "volume other is staged at the same path"},
		{"publish", "/k/stages/other/globalmount/in", state.FailedPrecondition, "volume other is staged at"},
		{"publish", "/k/stages/other", state.FailedPrecondition, "volume other is staged at"},
		{"stage", "/k/pods/1/mount", state.FailedPrecondition, "volume other is published"},
		{"stage", "/k/pods/1/mount/in", state.FailedPrecondition, "end that by NodeUnpublishVolume"},
		{"stage", "/k/stages/other/globalmount/in", state.FailedPrecondition, "end that by NodeUnstageVolume"},
		{"stage", "/k/stages", state.FailedPrecondition, "which lies below it"},
		{"publish", "/k/pods/2/mount", state.Aborted, "volume going is still being unpublished from the same path"},
		{"publish", "/k/pods/2/mount/in", state.Aborted, "still being unpublished from /k/pods/2/mount"},
		{"stage", "/k/unstaged/in", state.Aborted, "volume unstaged is still being unstaged from"},
		{"stage", "/k/pods", state.FailedPrecondition, "volume other"}, // one that stays tells more than one that goes
		{"publish", "/k/pods/1/mount2", 0, ""},
		{"publish", "/k/pods/1/moun", 0, ""},
		{"stage", "/k/stages/oth", 0, ""},
		{"unpublish", "/k/pods/1/mount/in", 0, ""}, // what is to go may go from anywhere
		{"unpublish", "/k/pods/1/mount", 0, ""},
	} {
		id := "v"
		if row.what == "stage" {
			id = "fresh" + row.path
		}
		_, err := s.Edit(id, askedAt(row.what, row.path))
		if row.words == "" {
			if err != nil {
				t.Errorf("%s at %s: %v", row.what, row.path, err)
			}
			continue
		}
		if err == nil || state.ClassOf(err) != row.class || !strings.Contains(err.Error(), row.words) || !strings.Contains(err.Error(), row.path) {
			t.Errorf("%s at %s: %v, want %s and %q", row.what, row.path, err, row.class, row.words)
		}
		if row.what == "stage" && s.Get(id) != nil {
			t.Errorf("%s at %s: refused, and there is a record", row.what, row.path)
		}
	}
}

// A refusal is not final while what was asked for the same part before may yet
// come. A path is taken after a restart, and free once what was there has gone.
func TestPathsAreFreedAndKept(t *testing.T) {
	path := t.TempDir()
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", staged("/k/s"))
	mustEdit(t, s, "w", staged("/k/w"))
	refused := func(id, at string, class state.Class) {
		t.Helper()
		if _, err := s.Edit(id, staged(at)); state.ClassOf(err) != class || !strings.Contains(err.Error(), "which lies") {
			t.Errorf("%s at %s: %v, want %s", id, at, err, class)
		}
	}
	refused("w", "/k/s/in", state.Aborted)
	if w := s.Get("w"); w.Stage.Path != "/k/w" || w.Stage.Gone {
		t.Errorf("the stage is %+v", w.Stage)
	}
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	refused("x", "/k/s/in", state.FailedPrecondition)
	mustEdit(t, s, "v", askedAt("unstage", "/k/s"))
	refused("x", "/k/s/in", state.Aborted)
	mustEdit(t, s, "v", func(v *state.Volume) error { v.Drop(state.StagePart()); return nil })
	mustEdit(t, s, "x", staged("/k/s/in"))
	refused("v", "/k/s", state.FailedPrecondition)
}

// An edit that was not written takes no path, and gives none up.
func TestPathsOfALostCommit(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir, testBoot)
	mustEdit(t, s, "v", staged("/k/v"))
	for _, id := range []string{"v", "w"} {
		must(t, os.Mkdir(fileOf(dir, id)+freshSuffix, 0o700)) // in the way
	}
	for id, edit := range map[string]func(*state.Volume) error{"w": staged("/k/w"), "v": accepted} {
		if _, err := s.Edit(id, edit); err == nil || s.Get("w") != nil || s.Get("v").Stage.Accepted {
			t.Errorf("volume %s was written (%v), there are %v", id, err, s.List())
		}
	}
	mustEdit(t, s, "x", staged("/k/w"))
	if _, err := s.Edit("w", staged("/k/v")); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("at the path of the first: %v", err)
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

// The index says what a walk over all records says.
func TestPlacesAgreeWithAWalk(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	name := func() string { return string(rune('a' + random.IntN(3))) }
	records := map[string]*state.Volume{}
	index := newPlaces()
	refusals := map[state.Class]int{}
	for range 20000 {
		id, where := name(), "/"+name()
		for random.IntN(3) > 0 {
			where += "/" + name()
		}
		before := cmp.Or(records[id], &state.Volume{ID: id})
		after := before.Clone()
		intent := state.Intent{Gone: random.IntN(2) == 0, Accepted: true}
		switch random.IntN(4) {
		case 0:
			after.Stage = &state.Stage{Path: where, Intent: intent}
		case 1:
			after.Targets[where] = &state.Target{Path: where, Intent: intent}
		case 2:
			after.Stage = nil
		case 3:
			clear(after.Targets)
		}
		err := index.apart(before, after)
		want := walk(records, before, after)
		if err == nil && want != 0 || err != nil && state.ClassOf(err) != want {
			t.Fatalf("%v, a walk over all says %v", err, want)
		}
		if err != nil {
			refusals[want]++
			continue
		}
		index.claim(before, after)
		index.release(before, after)
		records[after.ID] = after
	}
	if refusals[state.Aborted] < 100 || refusals[state.FailedPrecondition] < 100 {
		t.Errorf("refused only %v", refusals)
	}
	for _, v := range records {
		index.release(v, nil)
	}
	if len(index.at) > 0 || len(index.below) > 0 {
		t.Errorf("of nothing is left: %v, %v", index.at, index.below)
	}
}

// walk is the rule without an index; Unavailable, the zero Class, is no refusal.
func walk(records map[string]*state.Volume, before, after *state.Volume) (class state.Class) {
	for _, asked := range besides(after, before) {
		for _, v := range records {
			for _, o := range occupants(v) {
				itself := o.volume == asked.volume && o.kind == asked.kind && (o.kind == state.StageKind || o.path == asked.path)
				near := strings.HasPrefix(asked.path+"/", o.path+"/") || strings.HasPrefix(o.path+"/", asked.path+"/")
				if !asked.gone && !itself && near && class != state.FailedPrecondition {
					if class = state.Aborted; !o.gone {
						class = state.FailedPrecondition
					}
				}
			}
		}
	}
	return class
}

// Records of older versions have paths as they were asked.
func TestSpell(t *testing.T) {
	path := t.TempDir()
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", staged("/link/s"))
	mustEdit(t, s, "v", published("/link/pod"))
	mustEdit(t, s, "v", askedAt("unpublish", "/real/pod")) // the same place, asked for later
	mustEdit(t, s, "v", published("/real/pod-2"))
	mustEdit(t, s, "v", published("/link/pod-3"))
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	s.Spell(func(path string) string { return strings.Replace(path, "/link/", "/real/", 1) })
	v := s.Get("v")
	if v.Stage.Path != "/real/s" || len(v.Targets) != 3 || !v.Targets["/real/pod"].Gone || v.Targets["/real/pod-2"].Gone || v.Targets["/real/pod-3"].Path != "/real/pod-3" {
		t.Errorf("%s", text(v))
	}
	if _, err := s.Edit("w", staged("/real/s/in")); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("in a stage that was spelled otherwise: %v", err)
	}
	mustEdit(t, s, "v", askedAt("unpublish", "/real/pod-2"))
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	if v := s.Get("v"); v.Stage.Path != "/real/s" || v.Targets["/link/pod-3"] != nil {
		t.Errorf("after the next edit the disk has %s", text(v))
	}
}

// Five thousand volumes: one question costs no more than with few.
func BenchmarkPlaces(b *testing.B) {
	for _, n := range []int{10, 5000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			index := newPlaces()
			volume := func(i int) *state.Volume {
				v := &state.Volume{ID: fmt.Sprint(i), Stage: &state.Stage{Path: fmt.Sprintf("/var/lib/kubelet/plugins/kubernetes.io/csi/csi-node.local/%d/globalmount", i)}, Targets: map[string]*state.Target{}}
				pod := fmt.Sprintf("/var/lib/kubelet/pods/%d/volumes/kubernetes.io~csi/%d/mount", i, i)
				v.Targets[pod] = &state.Target{Path: pod, Intent: state.Intent{Since: time.Unix(1, 0)}}
				return v
			}
			for i := range n {
				index.claim(nil, volume(i))
			}
			v := volume(n)
			for b.Loop() {
				if err := index.apart(nil, v); err != nil {
					b.Fatal(err)
				}
				index.claim(nil, v)
				index.release(v, nil)
			}
		})
	}
}
