package state

import (
	"testing"
)

func askInline(change ...func(*Stage, *Target)) func(*Volume) error {
	return func(v *Volume) error {
		s := &Stage{Path: "/inline", Capability: aTarget("/a").Capability, Backend: "pool", Inline: &Inline{PodUID: "1", Target: "/a", Attributes: map[string]string{"size": "1Gi"}}}
		t := aTarget("/a")
		for _, c := range change {
			c(s, t)
		}
		return v.AskInline(s, t, editTime)
	}
}

func askEnd(path string) func(*Volume) error {
	return func(v *Volume) error { return v.AskEnd(path, "/inline", editTime) }
}

func made(v *Volume) error { v.Stage.Inline.Made = true; return nil }
func used(v *Volume) error { v.Stage.Inline.Used = true; return nil }
func begun(v *Volume) error {
	v.Stage.Begun = true
	return nil
}
func stageHolds(v *Volume) error  { v.Accept(StagePart(), true); return nil }
func targetHolds(v *Volume) error { v.Accept(TargetPart("/a"), true); return nil }

// One request asks for an inline volume, and what it names is what it is.
func TestAskInline(t *testing.T) {
	v := lost(t, askInline(), askInline())
	if v.Backend != "pool" || v.Stage.Inline.Used || v.Targets["/a"] == nil {
		t.Fatalf("the record is %+v with %+v", v, v.Stage)
	}
	v = lost(t, askInline(), made, stageHolds, targetHolds)
	if !v.Stage.Inline.Used {
		t.Error("what was published holds no pod's data")
	}
	for name, change := range map[string]func(s *Stage, t *Target){
		"size": func(s *Stage, _ *Target) { s.Inline.Attributes["size"] = "2Gi" },
		"pod":  func(s *Stage, _ *Target) { s.Inline.PodUID = "2" },
		"target": func(s *Stage, t *Target) {
			s.Inline.Target, t.Path = "/b", "/b"
		},
		"claim": func(s *Stage, _ *Target) { s.Inline, s.Path = nil, "/claim" },
	} {
		if err := askInline(change)(v.Clone()); ClassOf(err) != AlreadyExists {
			t.Errorf("another %s: %v", name, err)
		}
	}
	c := v.Clone()
	c.Stage.Inline.Made = false
	c.Stage.Inline.Attributes["size"] = "2Gi"
	if !v.Stage.Inline.Made || v.Stage.Inline.Attributes["size"] != "1Gi" {
		t.Error("a clone shares what changes")
	}
}

// A refused publish ends what was made for it, and nothing else.
func TestWithdrawInline(t *testing.T) {
	for name, test := range map[string]struct {
		before []func(*Volume) error
		stage  string
		target bool // is left, as a tombstone
	}{
		"not made":                      {nil, "forgotten", false},
		"made":                          {[]func(*Volume) error{made}, "ended", true},
		"made and staged":               {[]func(*Volume) error{made, begun, stageHolds}, "ended", true},
		"used before":                   {[]func(*Volume) error{made, used}, "forgotten", false},
		"used before and begun":         {[]func(*Volume) error{made, used, begun}, "withdrawn", false},
		"used before and staged":        {[]func(*Volume) error{made, used, begun, stageHolds}, "kept", false},
		"published":                     {[]func(*Volume) error{made, begun, stageHolds, targetHolds}, "kept", true},
		"published elsewhere, as it is": {[]func(*Volume) error{made, stageHolds, func(v *Volume) error { v.Targets["/b"] = aTarget("/b"); return nil }}, "kept", false},
	} {
		v := lost(t, append([]func(*Volume) error{askInline()}, test.before...)...)
		v.Withdraw(TargetPart("/a"), editTime)
		stage := "kept"
		switch s := v.Stage; {
		case s == nil:
			stage = "forgotten"
		case s.Gone && s.Inline.Ended:
			stage = "ended"
		case s.Gone:
			stage = "withdrawn"
		}
		if stage != test.stage || (v.Targets["/a"] != nil) != test.target {
			t.Errorf("%s: the stage is %s, the target %+v", name, stage, v.Targets["/a"])
		}
	}
}

// The end of a publish is the end of the inline volume that lives for it, and of no other.
func TestAskEnd(t *testing.T) {
	ended := func(v *Volume) bool {
		return v.Stage != nil && v.Stage.Gone && v.Stage.Inline.Ended && v.Stage.Inline.Made
	}
	v := lost(t, askInline(), made, stageHolds, targetHolds, askEnd("/b"))
	if v.Stage.Gone || !v.Targets["/b"].Gone {
		t.Errorf("an end elsewhere makes %+v", v.Stage)
	}
	if err := askEnd("/a")(v); err != nil || !ended(v) || v.Stage.Provisional || !v.Targets["/a"].Gone {
		t.Errorf("its end makes %+v (%v)", v.Stage, err)
	}
	v = lost(t, askInline(), made, used, stageHolds, func(v *Volume) error { v.Withdraw(TargetPart("/a"), editTime); return nil }, askEnd("/b"))
	if v.Stage.Gone {
		t.Errorf("an end elsewhere, after a refusal, makes %+v", v.Stage)
	}
	v = lost(t, askInline(), made, stageHolds, targetHolds, func(v *Volume) error { return v.AskUnpublish("/a", editTime) })
	alone := v.Targets["/a"].Revision
	v.Revision++
	if err := askEnd("/a")(v); err != nil || v.Targets["/a"].Revision == alone {
		t.Errorf("its end joins that of its publish alone (%v)", err)
	}
	if v = lost(t, askInline(), askEnd("/a")); !ended(v) || !v.Stage.Provisional {
		t.Errorf("while it may be being made, %+v", v.Stage)
	}
	if v = lost(t, askEnd("/a")); !ended(v) || !v.Stage.Provisional || v.Stage.Path != "/inline" {
		t.Errorf("without a record %+v", v.Stage)
	}
	v.Drop(TargetPart("/b"))
	if !ended(v) {
		t.Error("another target takes the question along")
	}
	if err := v.AskStage(&Stage{Path: "/stage", Capability: aTarget("/a").Capability}, editTime); err != nil || v.Stage.Path != "/stage" {
		t.Errorf("a stage does not take its place: %+v (%v)", v.Stage, err)
	}
	v = lost(t, func(v *Volume) error {
		return v.AskStage(&Stage{Path: "/stage", Capability: aTarget("/a").Capability}, editTime)
	}, askEnd("/a"))
	if v.Stage.Gone || v.Stage.Inline != nil {
		t.Errorf("a claim's stage is %+v", v.Stage)
	}
	v = lost(t, func(v *Volume) error { return v.AskEnd("/a", "", editTime) })
	if v.Stage != nil {
		t.Errorf("without inline volumes there is %+v", v.Stage)
	}
	v = lost(t, askInline(), made, stageHolds, targetHolds, func(v *Volume) error { v.Stage.Inline = nil; return nil }, askEnd("/a"))
	if !ended(v) || v.Stage.Provisional {
		t.Errorf("of an earlier version's there is %+v", v.Stage)
	}
	v = lost(t, askInline(), made, stageHolds, targetHolds, func(v *Volume) error { v.Stage.Path = "/other"; return nil }, askEnd("/a"))
	if !ended(v) || v.Stage.Path != "/other" {
		t.Errorf("of a driver with another name there is %+v", v.Stage)
	}
}
