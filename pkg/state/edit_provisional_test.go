package state

import (
	"reflect"
	"testing"
)

// lost returns what an edit makes of a volume without a record.
func lost(t *testing.T, edits ...func(*Volume) error) *Volume {
	t.Helper()
	v := &Volume{ID: "v", Revision: 10, Targets: map[string]*Target{}}
	for _, edit := range edits {
		if err := edit(v); err != nil {
			t.Fatal(err)
		}
		v.Revision++
	}
	return v
}

func publishAt(path string, changes ...func(*Target)) func(*Volume) error {
	return func(v *Volume) error { return v.AskPublish(aTarget(path, changes...), "/stage", editTime) }
}

func grow(v *Volume) error {
	if err := v.Presume("", Capability{}, nil, editTime); err != nil {
		return err
	}
	return v.AskSize(100, 0, editTime)
}

// A publish that meets no stage record asks whether the stage stands.
func TestProvisionalStage(t *testing.T) {
	context := func(t *Target) {
		t.Context, t.Capability.Flags = map[string]string{"a": "1", "csi.storage.k8s.io/pod.name": "web-0"}, []string{"discard"}
	}
	v := lost(t, publishAt("/a", context))
	s := v.Stage
	if !s.Provisional || !s.Adopted || s.Accepted || s.Path != "/stage" || !s.Capability.Equal(v.Targets["/a"].Capability) || !reflect.DeepEqual(s.Context, map[string]string{"a": "1"}) {
		t.Fatalf("the stage is %+v", s)
	}
	if err := publishAt("/b", context)(v); err != nil || v.Stage != s || v.Targets["/a"] == nil {
		t.Errorf("a second publish makes %+v (%v)", v, err)
	}
	v.Adopt("", "rw,discard", true, "disk")
	if s := v.Stage; s.Provisional || !s.Accepted || !s.ReadOnly || s.Found != "rw,discard" || v.Backend != "disk" {
		t.Errorf("adopted is %+v of %q", s, v.Backend)
	}
	v = lost(t, publishAt("/a", func(t *Target) { t.Capability.FSType = "" }))
	v.Adopt("xfs", "rw", false, "")
	if v.Stage.Capability.FSType != "xfs" || v.Targets["/a"].Capability.FSType != "xfs" {
		t.Errorf("adopted as %+v with %+v", v.Stage, v.Targets["/a"])
	}
}

// It stays as long as anything needs it, and nothing is left of it.
func TestProvisionalStageGoesWithTheLast(t *testing.T) {
	v := lost(t, grow, publishAt("/a"), publishAt("/b"))
	if v.Size != nil || v.Stage.Path != "/stage" { // nobody waits for the size
		t.Fatalf("the record is %+v", v)
	}
	v.Withdraw(TargetPart("/a"), editTime)
	if v.Stage == nil || v.Targets["/a"] != nil {
		t.Fatalf("the record is %+v", v)
	}
	if err := v.AskUnpublish("/b", editTime); err != nil {
		t.Fatal(err)
	}
	if v.Drop(TargetPart("/b")); !v.Empty() {
		t.Errorf("left is %+v", v)
	}
	v = lost(t, grow)
	if v.Withdraw(SizePart(), editTime); !v.Empty() || v.Size != nil {
		t.Errorf("left is %+v", v)
	}
	v = lost(t, publishAt("/a"), grow)
	v.Withdraw(TargetPart("/a"), editTime)
	if v.Stage == nil || v.Size == nil {
		t.Errorf("the record is %+v", v)
	}
}

// It gives way to whatever is asked for in earnest, when nobody waits.
func TestProvisionalStageGivesWay(t *testing.T) {
	asked := func(v *Volume) error {
		v.Targets["/a"].CallerWaits = true
		return nil
	}
	xfs := func(t *Target) { t.Capability.FSType = "xfs" }
	restage := func(v *Volume) error {
		return v.AskStage(aStage(func(s *Stage) { s.Backend = "disk" }), editTime)
	}
	v := lost(t, publishAt("/a"))
	if err := restage(v); err != nil || v.Stage.Provisional || v.Stage.Begun || v.Stage.Revision != 11 || len(v.Targets) > 0 || v.Backend != "disk" || v.Stage.Backend != "" {
		t.Errorf("a stage makes %+v, %+v (%v)", v, v.Stage, err)
	}
	v = lost(t, publishAt("/a"))
	if err := publishAt("/b", xfs)(v); err != nil || v.Targets["/a"] != nil || v.Stage.Capability.FSType != "xfs" {
		t.Errorf("another publish makes %+v (%v)", v, err)
	}
	v = lost(t, grow)
	if err := v.AskUnstage("/stage", editTime); err != nil || v.Stage.Provisional || !v.Stage.Gone || v.Stage.Path != "/stage" || v.Size != nil {
		t.Errorf("an unstage makes %+v (%v)", v.Stage, err)
	}
	v = lost(t, grow)
	if err := v.AskUnpublish("/a", editTime); err != nil || !v.Targets["/a"].Gone {
		t.Errorf("an unpublish makes %+v (%v)", v, err)
	}
	asks{
		"stage, waited for":     {have: lost(t, publishAt("/a"), asked), edit: restage, class: Aborted, words: "a caller waits"},
		"publish, waited for":   {have: lost(t, publishAt("/a"), asked), edit: publishAt("/b", xfs), class: Aborted, words: "a caller waits"},
		"unstage, published":    {have: lost(t, publishAt("/a")), edit: func(v *Volume) error { return v.AskUnstage("/x", editTime) }, class: FailedPrecondition, words: "/a"},
		"publish of what goes":  {have: lost(t, func(v *Volume) error { return v.AskUnpublish("/a", editTime) }), edit: publishAt("/a"), class: Aborted, words: "unpublished"},
		"publish of the same":   {have: record(with("/a", goneTarget), func(v *Volume) { v.Stage = nil }), edit: publishAt("/a"), class: Aborted, words: "unpublished"},
		"publish in the volume": {have: lost(t), edit: publishAt("/stage/a"), class: InvalidArgument, words: "apart"},
		"a size, waited for": {have: lost(t, func(v *Volume) error {
			err := grow(v)
			v.Size.CallerWaits = true
			return err
		}), edit: publishAt("/a"), class: Aborted, words: "size"},
	}.run(t)
}

// What needs it and was begun, as a tombstone was there before, is undone when it gives way.
func TestProvisionalStageLeavesTombstones(t *testing.T) {
	xfs := func(t *Target) { t.Capability.FSType = "xfs" }
	begun := func() *Volume {
		return lost(t, publishAt("/a"), func(v *Volume) error {
			v.Targets["/a"].Begun = true
			return nil
		})
	}
	for name, ask := range map[string]func(*Volume) error{
		"a stage":         func(v *Volume) error { return v.AskStage(aStage(), editTime) },
		"another publish": publishAt("/b", xfs),
		"a publish there": publishAt("/a", xfs),
		"a size":          func(v *Volume) error { return v.Presume("/other", aStage().Capability, nil, editTime) },
	} {
		v := begun()
		if err := ask(v); err != nil || v.Targets["/a"] == nil || !v.Targets["/a"].Gone {
			t.Errorf("%s makes %+v at /a (%v)", name, v.Targets["/a"], err)
		}
	}
	v := begun()
	if err := publishAt("/a", xfs)(v); err != nil || v.Targets["/a"].Next == nil {
		t.Errorf("a publish there makes %+v (%v)", v.Targets["/a"], err)
	}
	if err := v.AskStage(aStage(), editTime); err != nil || v.Stage.Provisional || v.Targets["/a"].Next != nil {
		t.Errorf("a stage makes %+v, and %+v at /a (%v)", v.Stage, v.Targets["/a"], err)
	}
	v = begun()
	if err := publishAt("/stage/b", xfs)(v); err == nil || v.Targets["/a"].Gone {
		t.Errorf("a refused publish makes %+v at /a (%v)", v.Targets["/a"], err)
	}
}
