package state

import (
	"reflect"
	"testing"
)

func noatime(s *Stage)  { s.Capability.Flags = []string{"noatime"} }
func reading(t *Target) { t.ReadOnly = true }

// What was never accepted gives way to another request: at once if nothing was
// begun for it, else behind a tombstone.
func TestStageGivesWay(t *testing.T) {
	elsewhere := func(s *Stage) { s.Path = "/elsewhere" }
	for title, other := range map[string]func(*Stage){
		"flags": noatime, "path": elsewhere,
		"fs type":   func(s *Stage) { s.Capability.FSType = "xfs" },
		"context":   func(s *Stage) { s.Context = map[string]string{"a": "1"} },
		"mode":      func(s *Stage) { s.Capability.Mode = "SINGLE_NODE_WRITER" },
		"read-only": func(s *Stage) { s.ReadOnly = true },
		"block":     func(s *Stage) { s.Capability = Capability{Access: BlockAccess, Mode: s.Capability.Mode} },
	} {
		t.Run(title, func(t *testing.T) {
			v := record()
			if err := v.AskStage(aStage(other), editTime); err != nil || !v.Stage.SameAs(aStage(other)) || v.Stage.Revision != 10 || v.Stage.Begun || v.Stage.Gone {
				t.Errorf("in place of what was not begun stands %+v (%v)", v.Stage, err)
			}

			v = record(with("/a", func(t *Target) { t.Begun = true }), func(v *Volume) { v.Stage.Begun = true })
			if err := v.AskStage(aStage(other), editTime); err != nil {
				t.Fatal(err)
			}
			s := v.Stage
			if !s.Gone || !s.Withdrawn || s.Revision != 10 || !s.Next.SameAs(aStage(other)) || s.Next.Begun || v.Latest(StagePart()).Revision != 10 || !v.Targets["/a"].Withdrawn {
				t.Fatalf("the tombstone is %+v, the next %+v, its target %+v", s, s.Next, v.Targets["/a"])
			}
			before := v.Clone()
			v.Revision = 11
			if err := v.AskStage(aStage(other), editTime); err != nil || !reflect.DeepEqual(v.Stage, before.Stage) {
				t.Errorf("asked again: %+v (%v)", v.Stage, err)
			}
			if err := v.AskPublish(aTarget("/b"), "/stage", editTime); ClassOf(err) != Aborted {
				t.Errorf("a publish meanwhile: %v", err)
			}
			third := v.Clone()
			if err := third.AskStage(aStage(other, func(s *Stage) { s.Capability.Flags = []string{"nosuid"} }), editTime); err != nil || third.Stage.Next.Revision != 11 || !third.Stage.Gone {
				t.Errorf("a third one: %+v (%v)", third.Stage, err)
			}
			back := v.Clone()
			if err := back.AskStage(aStage(), editTime); err != nil || back.Stage.Gone || back.Stage.Next != nil || !back.Stage.Begun {
				t.Errorf("back to the first: %+v (%v)", back.Stage, err)
			}
			v.Drop(StagePart())
			if !v.Stage.SameAs(aStage(other)) || v.Stage.Gone || v.Stage.Next != nil {
				t.Errorf("after the undo stands %+v", v.Stage)
			}
		})
	}
}

func TestWhatIsWaitedForDoesNotGiveWay(t *testing.T) {
	asked := func(v *Volume) { v.Stage.CallerWaits = true }
	askedTarget := func(t *Target) { t.CallerWaits = true }
	next := func(v *Volume) {
		gone(&v.Stage.Intent)
		v.Stage.Next = aStage(func(s *Stage) { s.CallerWaits = true })
	}
	nextTarget := func(t *Target) {
		gone(&t.Intent)
		t.Next = aTarget("/a", func(t *Target) { t.CallerWaits = true })
	}
	restage := func(v *Volume) error { return v.AskStage(aStage(noatime), editTime) }
	republish := func(v *Volume) error { return v.AskPublish(aTarget("/a", reading), "/stage", editTime) }
	asks{
		"stage":                {have: record(asked), edit: restage, class: Aborted, words: "a caller waits"},
		"target of the stage":  {have: record(with("/a", askedTarget)), edit: restage, class: Aborted, words: "target /a"},
		"next stage":           {have: record(next), edit: restage, class: Aborted, words: "a caller waits"},
		"target":               {have: record(with("/a", askedTarget)), edit: republish, class: Aborted, words: "target /a"},
		"next target":          {have: record(with("/a", nextTarget)), edit: republish, class: Aborted, words: "target /a"},
		"size":                 {have: record(func(v *Volume) { v.Size = &Size{Intent: Intent{CallerWaits: true}, Bytes: 1} }), edit: func(v *Volume) error { return v.AskSize(2, 0, editTime) }, class: Aborted, words: "size"},
		"what a pod was shown": {have: record(with("/a", acceptedTarget)), edit: restage, class: AlreadyExists, words: "staged already"},
	}.run(t)
}

func TestTargetGivesWay(t *testing.T) {
	ask := func(v *Volume, changes ...func(*Target)) error {
		return v.AskPublish(aTarget("/a", changes...), "/stage", editTime)
	}
	v := record(with("/a"))
	if err := ask(v, reading); err != nil || !v.Targets["/a"].ReadOnly || v.Targets["/a"].Gone {
		t.Errorf("in place of what was not begun stands %+v (%v)", v.Targets["/a"], err)
	}
	v = record(with("/a", func(t *Target) { t.Begun = true }))
	if err := ask(v, reading); err != nil {
		t.Fatal(err)
	}
	if have := v.Targets["/a"]; !have.Gone || !have.Withdrawn || !have.Next.ReadOnly || have.Next.Revision != 10 {
		t.Fatalf("the tombstone is %+v, the next %+v", have, have.Next)
	}
	if err := v.AskUnstage("/stage", editTime); ClassOf(err) != FailedPrecondition {
		t.Errorf("an unstage beneath what is to be published: %v", err)
	}
	ended := v.Clone()
	if err := ended.AskUnpublish("/a", editTime); err != nil || ended.Targets["/a"].Next != nil || ended.Targets["/a"].Withdrawn {
		t.Errorf("an unpublish makes %+v (%v)", ended.Targets["/a"], err)
	}
	v.Drop(TargetPart("/a"))
	if have := v.Targets["/a"]; have.Gone || !have.ReadOnly || have.Next != nil {
		t.Errorf("after the undo stands %+v", have)
	}
}

// A final code would have kubelet forget what an earlier call has begun.
func TestNoFinalRefusalOverAPendingPublish(t *testing.T) {
	begun := func(t *Target) { t.Begun = true }
	flags := func(t *Target) { t.Capability.Flags = []string{"data=journal"} }
	asks{
		"flags":          {have: record(with("/a", begun)), edit: func(v *Volume) error { return v.AskPublish(aTarget("/a", flags), "/stage", editTime) }, class: Aborted, words: "data"},
		"staged at /x":   {have: record(with("/a", begun)), edit: func(v *Volume) error { return v.AskPublish(aTarget("/a"), "/x", editTime) }, class: Aborted, words: "/x"},
		"taken back":     {have: record(with("/a", goneTarget, func(t *Target) { t.Withdrawn = true })), edit: func(v *Volume) error { return v.AskPublish(aTarget("/a"), "/x", editTime) }, class: Aborted, words: "/x"},
		"beside another": {have: record(with("/a", begun)), edit: func(v *Volume) error { return v.AskPublish(aTarget("/b", flags), "/stage", editTime) }, class: InvalidArgument, words: "data"},
	}.run(t)
}

// What a refused publish met gives way, unless the CO was told of it or a caller waits.
func TestGiveUp(t *testing.T) {
	next := func(t *Target) { t.Next = aTarget("/a", reading) }
	for title, test := range map[string]struct {
		have       []func(*Target)
		gone, next bool // what stands then; none of both: as before
		dropped    bool
	}{
		"asked":             {dropped: true},
		"begun":             {have: []func(*Target){func(t *Target) { t.Begun = true }}, gone: true},
		"told":              {have: []func(*Target){func(t *Target) { t.Accepted = true }}},
		"held, never told":  {have: []func(*Target){func(t *Target) { t.Accepted, t.Unconfirmed = true, true }}, gone: true},
		"waited for":        {have: []func(*Target){func(t *Target) { t.Begun, t.CallerWaits = true, true }}},
		"next":              {have: []func(*Target){goneTarget, next}, gone: true},
		"next, waited for":  {have: []func(*Target){goneTarget, next, func(t *Target) { t.Next.CallerWaits = true }}, gone: true, next: true},
		"unpublished, only": {have: []func(*Target){goneTarget}, gone: true},
	} {
		v := record(with("/a", test.have...))
		v.GiveUp(TargetPart("/a"), editTime)
		have := v.Targets["/a"]
		if dropped := have == nil; dropped != test.dropped || !dropped && (have.Gone != test.gone || (have.Next != nil) != test.next) {
			t.Errorf("%s: became %+v", title, have)
		}
	}
	v := record()
	if v.GiveUp(TargetPart("/a"), editTime); len(v.Targets) > 0 {
		t.Errorf("nothing became %+v", v.Targets)
	}
}

// An unstage ends what was begun and what was to follow.
func TestUnstageOfWhatGivesWay(t *testing.T) {
	superseded := func(path string) *Volume {
		v := record(func(v *Volume) { v.Stage.Begun = true })
		if err := v.AskStage(aStage(noatime, func(s *Stage) { s.Path = path }), editTime); err != nil {
			t.Fatal(err)
		}
		return v
	}
	v := superseded("/stage")
	if err := v.AskUnstage("/stage", editTime); err != nil || v.Stage.Next != nil || v.Stage.Withdrawn || !v.Stage.Gone {
		t.Errorf("an unstage makes %+v (%v)", v.Stage, err)
	}
	v = superseded("/x")
	if err := v.AskUnstage("/stage", editTime); ClassOf(err) != Aborted || v.Stage.Next == nil {
		t.Errorf("an unstage of what is being undone: %v, %+v", err, v.Stage)
	}
	if err := v.AskUnstage("/x", editTime); err != nil || v.Stage.Next != nil || !v.Stage.Gone {
		t.Errorf("an unstage of what was to follow makes %+v (%v)", v.Stage, err)
	}
}
