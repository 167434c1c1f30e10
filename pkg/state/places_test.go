package state

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"testing"
	"time"
)

// askedAt returns an edit that asks for a stage, a target, or for the end of one.
func askedAt(what, path string) func(*Volume) error {
	return func(v *Volume) error {
		switch what {
		case "stage":
			return v.AskStage(aStage(func(s *Stage) { s.Path = path }), editTime)
		case "unstage":
			return v.AskUnstage(path, editTime)
		case "publish":
			return v.AskPublish(aTarget(path), v.Stage.Path, editTime)
		}
		return v.AskUnpublish(path, editTime)
	}
}

// Whatever a volume is asked to be at lies apart from where every other one is,
// or is still going from.
func TestPathsOfVolumesLieApart(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	for _, id := range []string{"other", "going", "v"} {
		mustEdit(t, s, id, askedAt("stage", "/k/stages/"+id+"/globalmount"))
	}
	mustEdit(t, s, "other", askedAt("publish", "/k/pods/1/mount"))
	mustEdit(t, s, "going", askedAt("publish", "/k/pods/2/mount"))
	mustEdit(t, s, "going", askedAt("unpublish", "/k/pods/2/mount"))
	mustEdit(t, s, "unstaged", askedAt("unstage", "/k/unstaged"))
	for _, row := range []struct {
		what, path string
		class      Class
		words      string
	}{
		{"publish", "/k/pods/1/mount", FailedPrecondition, "volume other is published at the same path"},
		{"publish", "/k/pods/1/mount/in/it", FailedPrecondition, "volume other is published at /k/pods/1/mount, which lies above it"},
		{"publish", "/k/pods/1", FailedPrecondition, "volume other is published at /k/pods/1/mount, which lies below it"},
		{"publish", "/k/stages/other/globalmount", FailedPrecondition, "volume other is staged at the same path"},
		{"publish", "/k/stages/other/globalmount/in", FailedPrecondition, "volume other is staged at"},
		{"publish", "/k/stages/other", FailedPrecondition, "volume other is staged at"},
		{"stage", "/k/pods/1/mount", FailedPrecondition, "volume other is published"},
		{"stage", "/k/pods/1/mount/in", FailedPrecondition, "end that by NodeUnpublishVolume"},
		{"stage", "/k/stages/other/globalmount/in", FailedPrecondition, "end that by NodeUnstageVolume"},
		{"stage", "/k/stages", FailedPrecondition, "which lies below it"},
		{"publish", "/k/pods/2/mount", Aborted, "volume going is still being unpublished from the same path"},
		{"publish", "/k/pods/2/mount/in", Aborted, "still being unpublished from /k/pods/2/mount"},
		{"stage", "/k/unstaged/in", Aborted, "volume unstaged is still being unstaged from"},
		{"stage", "/k/pods", FailedPrecondition, "volume other"}, // one that stays tells more than one that goes
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
		if err == nil || ClassOf(err) != row.class || !strings.Contains(err.Error(), row.words) || !strings.Contains(err.Error(), row.path) {
			t.Errorf("%s at %s: %v, want %s and %q", row.what, row.path, err, row.class, row.words)
		}
		if row.what == "stage" && s.Get(id) != nil {
			t.Errorf("%s at %s: refused, and there is a record", row.what, row.path)
		}
	}
}

// A refusal is not final while what was asked for the same part before may yet come.
func TestRefusedPathOfAPendingStage(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	mustEdit(t, s, "other", askedAt("stage", "/k/other"))
	mustEdit(t, s, "v", askedAt("stage", "/k/v"))
	if _, err := s.Edit("v", askedAt("stage", "/k/other/in")); ClassOf(err) != Aborted || !strings.Contains(err.Error(), "which lies above it") {
		t.Errorf("while its stage is pending: %v", err)
	}
	if v := s.Get("v"); v.Stage.Path != "/k/v" || v.Stage.Gone {
		t.Errorf("the stage is %+v", v.Stage)
	}
}

// A path is free again once what was there has gone, and taken after a restart.
func TestPathsAreFreedAndKept(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", askedAt("stage", "/k/s"))
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	if _, err := s.Edit("w", askedAt("stage", "/k/s/in")); ClassOf(err) != FailedPrecondition {
		t.Errorf("after a restart: %v", err)
	}
	mustEdit(t, s, "v", askedAt("unstage", "/k/s"))
	if _, err := s.Edit("w", askedAt("stage", "/k/s/in")); ClassOf(err) != Aborted {
		t.Errorf("while it goes: %v", err)
	}
	mustEdit(t, s, "v", func(v *Volume) error { v.Drop(StagePart()); return nil })
	mustEdit(t, s, "w", askedAt("stage", "/k/s/in"))
	if _, err := s.Edit("v", askedAt("stage", "/k/s")); ClassOf(err) != FailedPrecondition {
		t.Errorf("above what came: %v", err)
	}
}

// An edit that was not written takes no path.
func TestPathsOfALostCommit(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", askedAt("stage", "/k/v"))
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(path+".new/in/the/way", 0o700); err != nil { // where the store would be made anew
		t.Fatal(err)
	}
	if _, err := s.Edit("w", askedAt("stage", "/k/w")); err == nil {
		t.Fatal("it was written")
	}
	if err := os.RemoveAll(path + ".new"); err != nil {
		t.Fatal(err)
	}
	mustEdit(t, s, "x", askedAt("stage", "/k/w"))
	if _, err := s.Edit("w", askedAt("stage", "/k/v")); ClassOf(err) != FailedPrecondition {
		t.Errorf("at the path of the first: %v", err)
	}
}

// Of two calls at once for paths of which one lies in the other, one is refused.
func TestPathsOfConcurrentEdits(t *testing.T) {
	s := openStore(t, storePath(t), testBoot)
	for round := range 200 {
		var group sync.WaitGroup
		errs := make([]error, 2)
		for i, path := range []string{fmt.Sprintf("/k/%d", round), fmt.Sprintf("/k/%d/in", round)} {
			group.Go(func() {
				_, errs[i] = s.Edit(fmt.Sprintf("%d-%d", round, i), askedAt("stage", path))
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
	path := func() string {
		p := "/" + name()
		for random.IntN(3) > 0 {
			p += "/" + name()
		}
		return p
	}
	records := map[string]*Volume{}
	index := newPlaces(records)
	refusals := map[Class]int{}
	for range 20000 {
		before := records[name()]
		if before == nil {
			before = &Volume{ID: name(), Targets: map[string]*Target{}}
			if records[before.ID] != nil {
				continue
			}
		}
		after := before.Clone()
		switch where := path(); random.IntN(4) {
		case 0:
			after.Stage = &Stage{Path: where, Intent: Intent{Gone: random.IntN(2) == 0, Accepted: true}}
		case 1:
			after.Targets[where] = &Target{Path: where, Intent: Intent{Gone: random.IntN(2) == 0, Accepted: true}}
		case 2:
			after.Stage = nil
		case 3:
			clear(after.Targets)
		}
		err := index.apart(before, after)
		want := walk(records, before, after)
		if err == nil && want != 0 || err != nil && ClassOf(err) != want {
			t.Fatalf("%v, a walk over all says %v", err, want)
		}
		if err != nil {
			refusals[want]++
			continue
		}
		index.move(before, after)
		records[after.ID] = after
	}
	if refusals[Aborted] < 100 || refusals[FailedPrecondition] < 100 {
		t.Errorf("refused only %v", refusals)
	}
	for _, v := range records {
		index.move(v, nil)
	}
	if len(index.at) > 0 || len(index.below) > 0 {
		t.Errorf("of nothing is left: %v, %v", index.at, index.below)
	}
}

// walk is the rule without an index; Unavailable, the zero Class, is no refusal.
func walk(records map[string]*Volume, before, after *Volume) (class Class) {
	near := func(a, b string) bool { return strings.HasPrefix(a+"/", b+"/") || strings.HasPrefix(b+"/", a+"/") }
	asked := map[string]string{} // part to path
	if s := after.Stage; s != nil && !s.Gone && (before.Stage == nil || before.Stage.Gone || before.Stage.Path != s.Path) {
		asked["stage"] = s.Path
	}
	for p, t := range after.Targets {
		if !t.Gone && (before.Targets[p] == nil || before.Targets[p].Gone) {
			asked["target "+p] = p
		}
	}
	meet := func(part, path string, gone bool, other *Volume, name string) {
		if other.ID == after.ID && part == name || !near(asked[part], path) {
			return
		}
		if !gone {
			class = FailedPrecondition
		} else if class == 0 {
			class = Aborted
		}
	}
	for part := range asked {
		for _, other := range records {
			if other.Stage != nil {
				meet(part, other.Stage.Path, other.Stage.Gone, other, "stage")
			}
			for p, t := range other.Targets {
				meet(part, p, t.Gone, other, "target "+p)
			}
		}
	}
	return class
}

// Records of older versions have paths as they were asked.
func TestSpell(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, testBoot)
	mustEdit(t, s, "v", askedAt("stage", "/link/s"))
	mustEdit(t, s, "v", askedAt("publish", "/link/pod"))
	mustEdit(t, s, "v", askedAt("unpublish", "/real/pod")) // the same place, asked for later
	mustEdit(t, s, "v", askedAt("publish", "/real/pod-2"))
	mustEdit(t, s, "v", askedAt("publish", "/link/pod-3"))
	closeStore(t, s)
	s = openStore(t, path, testBoot)
	s.Spell(func(path string) string { return strings.Replace(path, "/link/", "/real/", 1) })
	v := s.Get("v")
	if v.Stage.Path != "/real/s" || len(v.Targets) != 3 || !v.Targets["/real/pod"].Gone || v.Targets["/real/pod-2"].Gone || v.Targets["/real/pod-3"].Path != "/real/pod-3" {
		t.Errorf("%s", text(v))
	}
	if _, err := s.Edit("w", askedAt("stage", "/real/s/in")); ClassOf(err) != FailedPrecondition {
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
			index := newPlaces(nil)
			volume := func(i int) *Volume {
				v := &Volume{ID: fmt.Sprint(i), Stage: &Stage{Path: fmt.Sprintf("/var/lib/kubelet/plugins/kubernetes.io/csi/csi-node.local/%d/globalmount", i)}, Targets: map[string]*Target{}}
				pod := fmt.Sprintf("/var/lib/kubelet/pods/%d/volumes/kubernetes.io~csi/%d/mount", i, i)
				v.Targets[pod] = &Target{Path: pod, Intent: Intent{Since: time.Unix(1, 0)}}
				return v
			}
			for i := range n {
				index.move(nil, volume(i))
			}
			v := volume(n)
			for b.Loop() {
				if err := index.apart(nil, v); err != nil {
					b.Fatal(err)
				}
				index.move(nil, v)
				index.move(v, nil)
			}
		})
	}
}
