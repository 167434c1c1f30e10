package state

import "testing"

// An adopted stage is a guess only where the kernel does not tell.
func TestAskStageUnlikeTheAdopted(t *testing.T) {
	adopted := func(v *Volume) {
		v.Stage.Adopted, v.Stage.Accepted, v.Stage.Capability.Flags, v.Stage.Found = true, true, nil, "rw,discard"
	}
	asks{
		"for reading": {have: record(adopted), edit: func(v *Volume) error { return v.AskStage(aStage(func(s *Stage) { s.ReadOnly = true }), editTime) }, class: AlreadyExists, words: "/stage"},
		"elsewhere":   {have: record(adopted), edit: func(v *Volume) error { return v.AskStage(aStage(func(s *Stage) { s.Path = "/x" }), editTime) }, class: AlreadyExists, words: "/stage"},
		"other fs type": {have: record(adopted), edit: func(v *Volume) error {
			return v.AskStage(aStage(func(s *Stage) { s.Capability.FSType = "xfs" }), editTime)
		}, class: AlreadyExists, words: "xfs"},
	}.run(t)
}

func TestAskPublishOfAReadOnlyStage(t *testing.T) {
	reading := func(v *Volume) { v.Stage.ReadOnly = true }
	asks{
		"for writing": {have: record(reading), edit: func(v *Volume) error { return v.AskPublish(aTarget("/a"), "/stage", editTime) }, class: FailedPrecondition, words: "staged read-only"},
		"for reading": {have: record(reading), edit: func(v *Volume) error {
			return v.AskPublish(aTarget("/a", func(t *Target) { t.ReadOnly = true }), "/stage", editTime)
		}, part: TargetPart("/a")},
	}.run(t)
}

// A target that is asked for again while it goes may be that of a pod that was
// started with the number of its device.
func TestAskPublishKeepsTheDevice(t *testing.T) {
	number := DeviceNumber{Major: 7, Minor: 3}
	v := record(with("/a", goneTarget, func(t *Target) { t.Device = number }))
	if err := v.AskPublish(aTarget("/a"), "/stage", editTime); err != nil || v.Targets["/a"].Device != number {
		t.Errorf("the target became %+v (%v)", v.Targets["/a"], err)
	}
}

// However many growths are refused in a row, the accepted size comes back.
func TestWithdrawTheSecondOfTwoGrowths(t *testing.T) {
	v := record(func(v *Volume) { v.Size = &Size{Intent: Intent{Accepted: true}, Bytes: 100} })
	for _, bytes := range []int64{300, 200} {
		if err := v.AskSize(bytes, 0, editTime); err != nil || v.Size.Bytes != bytes || v.Size.Before != 100 || v.Size.Accepted {
			t.Fatalf("%d bytes: %+v (%v)", bytes, v.Size, err)
		}
	}
	if v.Withdraw(SizePart(), editTime); v.Size == nil || v.Size.Bytes != 100 || !v.Size.Accepted {
		t.Errorf("the size became %+v", v.Size)
	}
}

// A withdrawn stage leaves work behind only if work was begun.
func TestWithdrawStage(t *testing.T) {
	v := record()
	if v.Withdraw(StagePart(), editTime); v.Stage != nil {
		t.Errorf("a stage that was not begun became %+v", v.Stage)
	}
	v = record(func(v *Volume) { v.Stage.Begun = true })
	if v.Withdraw(StagePart(), editTime); v.Stage == nil || !v.Stage.Gone || !v.Stage.Withdrawn {
		t.Errorf("a stage that was begun became %+v", v.Stage)
	}
}

func TestRemovalBeginsAnew(t *testing.T) {
	v := record(func(v *Volume) { v.Stage.Accepted, v.Stage.Begun = true, true })
	if err := v.AskUnstage("/stage", editTime); err != nil {
		t.Fatal(err)
	}
	if want := (Intent{Gone: true, Revision: 10, Since: editTime}); v.Stage.Intent != want {
		t.Errorf("the tombstone is %+v, not %+v", v.Stage.Intent, want)
	}
}

// Revisions rise over boots, also over one in which nothing was asked.
func TestRevisionsRiseOverBoots(t *testing.T) {
	path := storePath(t)
	s := openStore(t, path, "first boot")
	mustEdit(t, s, "v", staged("/stage"))
	last := mustEdit(t, s, "v", func(v *Volume) error { return v.AskUnstage("/stage", editTime) }).Revision
	closeStore(t, s)
	closeStore(t, openStore(t, path, "second boot"))
	s = openStore(t, path, "second boot")
	defer closeStore(t, s)
	if now := mustEdit(t, s, "v", staged("/stage")).Revision; now <= last {
		t.Errorf("revision %d after %d", now, last)
	}
}

func TestReadersHaveCopies(t *testing.T) {
	s := openStore(t, storePath(t), "boot")
	defer closeStore(t, s)
	mustEdit(t, s, "v", staged("/stage"))
	s.Get("v").Stage.Path = "/changed"
	s.List()[0].Stage.Path = "/changed"
	if v := s.Get("v"); v.Stage.Path != "/stage" {
		t.Errorf("a reader changed the record to %+v", v.Stage)
	}
}

func TestFailedWriteIsTold(t *testing.T) {
	s := openStore(t, storePath(t), "boot")
	if err := s.db.Close(); err != nil { // beneath it
		t.Fatal(err)
	}
	if v, err := s.Edit("v", staged("/stage")); err == nil {
		t.Errorf("answered %+v", v)
	}
	if v := s.Get("v"); v != nil {
		t.Errorf("what was not written is shown: %+v", v)
	}
}
