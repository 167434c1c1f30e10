package state

import (
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// fullVolume has every field set.
func fullVolume() *Volume {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	intent := Intent{Gone: true, Withdrawn: true, Accepted: true, Revision: 7, Since: at, CallerWaits: true}
	c := Capability{Access: MountAccess, Mode: "SINGLE_NODE_WRITER", FSType: "ext4", Flags: []string{"ro"}}
	return &Volume{
		ID: "v", Revision: 9,
		Stage: &Stage{Intent: intent, Path: "/stage", Capability: c, ReadOnly: true, Context: map[string]string{"a": "b"}, Adopted: true},
		Targets: map[string]*Target{"/pod": {Intent: intent, Path: "/pod", Capability: c, ReadOnly: true,
			Context: map[string]string{"a": "b"}, SeenDevice: SeenDevice{Device: DeviceNumber{Major: 7, Minor: 3}}, From: &SeenSource{FSType: "nfs4", Source: "server:/v"}}},
		Size: &Size{Intent: intent, Bytes: 2, Before: 1},
	}
}

func TestCloneSharesNothing(t *testing.T) {
	v, c := fullVolume(), fullVolume().Clone()
	if !reflect.DeepEqual(v, c) {
		t.Fatalf("the clone is %+v", c)
	}
	c = v.Clone()
	c.Stage.Path, c.Size.Bytes, c.Targets["/pod"].Path = "x", 99, "x"
	c.Targets["/other"] = &Target{}
	c.Stage.Context["a"], c.Stage.Capability.Flags[0] = "x", "x"
	c.Targets["/pod"].Context["a"], c.Targets["/pod"].Capability.Flags[0] = "x", "x"
	if !reflect.DeepEqual(v, fullVolume()) {
		t.Errorf("a change of the clone changed %+v", v)
	}
	if c := (&Volume{ID: "v"}).Clone(); c.Targets == nil || !c.Empty() {
		t.Errorf("the clone of an empty volume is %+v", c)
	}
}

func TestVolumeJSON(t *testing.T) {
	text, err := json.Marshal(fullVolume())
	if err != nil {
		t.Fatal(err)
	}
	var back Volume
	if err := json.Unmarshal(text, &back); err != nil {
		t.Fatal(err)
	}
	want := fullVolume()
	want.ForgetCallers()
	if !reflect.DeepEqual(&back, want) {
		t.Errorf("read back %+v, not %+v", back, want)
	}
	if strings.Contains(string(text), "allerWaits") {
		t.Errorf("%s holds the mark CallerWaits", text)
	}
}

func TestSameAs(t *testing.T) {
	for name, change := range map[string]func(*Stage, *Target){
		"path":    func(s *Stage, t *Target) { s.Path, t.Path = "x", "x" },
		"access":  func(s *Stage, t *Target) { s.Capability.Access, t.Capability.Access = BlockAccess, BlockAccess },
		"mode":    func(s *Stage, t *Target) { s.Capability.Mode, t.Capability.Mode = "x", "x" },
		"fs type": func(s *Stage, t *Target) { s.Capability.FSType, t.Capability.FSType = "xfs", "xfs" },
		"flags":   func(s *Stage, t *Target) { s.Capability.Flags, t.Capability.Flags = nil, nil },
		"reading": func(s *Stage, t *Target) { s.ReadOnly, t.ReadOnly = false, false },
		"context": func(s *Stage, t *Target) { s.Context, t.Context = nil, nil },
	} {
		a, b := fullVolume(), fullVolume()
		change(b.Stage, b.Targets["/pod"])
		if a.Stage.SameAs(b.Stage) || a.Targets["/pod"].SameAs(b.Targets["/pod"]) {
			t.Errorf("another %s counts as the same", name)
		}
	}
	a, b := fullVolume(), fullVolume()
	b.Stage.Intent, b.Stage.Adopted = Intent{}, false
	b.Targets["/pod"].Intent, b.Targets["/pod"].Device = Intent{}, DeviceNumber{}
	a.Stage.Capability.Flags, b.Stage.Capability.Flags = []string{"x", "y"}, []string{"y", "x"}
	if !a.Stage.SameAs(b.Stage) || !a.Targets["/pod"].SameAs(b.Targets["/pod"]) {
		t.Error("what is not asked for counts")
	}
}

func TestPod(t *testing.T) {
	for want, context := range map[string]map[string]string{
		"default/writer-0": {podNamespaceKey: "default", podNameKey: "writer-0", "other": "x"},
		"":                 nil,
	} {
		if got := (&Target{Context: context}).Pod(); got != want {
			t.Errorf("%v: %q, want %q", context, got, want)
		}
	}
	for _, context := range []map[string]string{{podNameKey: "writer"}, {podNamespaceKey: "default"}, {podNamespaceKey: "default", podNameKey: "a\nb"}, {podNamespaceKey: "a/b", podNameKey: "c"}} {
		if got := (&Target{Context: context}).Pod(); got != "" {
			t.Errorf("%v: %q names no pod", context, got)
		}
	}
}

func TestClaimOf(t *testing.T) {
	parameters := map[string]string{claimNamespaceKey: "default", claimNameKey: "data-writer-0", "provisioning": "thin"}
	if got := ClaimOf(parameters); got != "default/data-writer-0" {
		t.Errorf("the claim is %q", got)
	}
	delete(parameters, claimNamespaceKey)
	if got := ClaimOf(parameters); got != "" {
		t.Errorf("%q names no claim", got)
	}
}

func TestStrings(t *testing.T) {
	for got, want := range map[string]string{
		Capability{Access: BlockAccess, Mode: "M"}.String():    "block M",
		fullVolume().Stage.Capability.String():                 "mount SINGLE_NODE_WRITER ext4 with mount flags",
		TargetPart("/pod").String():                            "target /pod",
		StagePart().String():                                   "stage",
		SizePart().String():                                    "size",
		DeviceNumber{Major: 7, Minor: 3}.String():              "7:3",
		DeviceAttached.String() + " " + DeviceForeign.String(): "attached foreign",
	} {
		if got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

func TestParts(t *testing.T) {
	v := fullVolume()
	v.Targets["/a"] = &Target{Path: "/a"}
	if got := v.Parts(); !slices.Equal(got, []Part{TargetPart("/a"), TargetPart("/pod"), StagePart(), SizePart()}) {
		t.Errorf("parts %v", got)
	}
	for _, p := range v.Parts() {
		v.Intent(p).Revision = 100 // points into the record
	}
	if v.Stage.Revision != 100 || v.Size.Revision != 100 || v.Targets["/a"].Revision != 100 {
		t.Errorf("the record is %+v", v)
	}
	for _, p := range []Part{StagePart(), SizePart(), TargetPart("/pod"), {}} {
		if (&Volume{}).Intent(p) != nil {
			t.Errorf("an empty volume has a %s", p)
		}
	}
}

func TestRoundedSize(t *testing.T) {
	for bytes, want := range map[int64]int64{1: 4096, 4096: 4096, 4097: 8192, 1 << 62: 1 << 62} {
		if got := RoundUp(bytes); got != want {
			t.Errorf("%d bytes are rounded to %d", bytes, got)
		}
	}
}
