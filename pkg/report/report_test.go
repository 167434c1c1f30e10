package report

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	gib   = 1 << 30
	pod   = "/pods/1/mount"
	place = "/stage"
)

var (
	now    = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	later  = now.Add(time.Minute)
	loop   = state.DeviceNumber{Major: 7, Minor: 1}
	target = state.TargetPart(pod)
	stage  = state.StagePart()
)

// staged is a record of a volume that is staged, and published if there is a target.
func staged(targets ...*state.Target) *state.Volume {
	v := &state.Volume{ID: "v", Stage: &state.Stage{
		Intent: state.Intent{Since: now.Add(-time.Hour)}, Path: place,
		Capability: state.Capability{Access: state.MountAccess, Mode: "SINGLE_NODE_WRITER", FSType: "ext4"},
	}}
	for _, t := range targets {
		if v.Targets == nil {
			v.Targets = map[string]*state.Target{}
		}
		v.Targets[t.Path] = t
	}
	return v
}

func attachedDevice() state.Device {
	return state.Device{State: state.DeviceAttached, Path: "/dev/loop1", Number: loop, Size: gib, Capacity: gib, Backing: "/pool/v", Formatted: "ext4"}
}

// One judgement, and all renderings of it.
func TestRenderingsAgree(t *testing.T) {
	boom := errors.New("volume v: stage: boom")
	settled, stuck := Verdict{Settled: true}, Verdict{Problem: "the disk is away"}
	for title, test := range map[string]struct {
		facts PartFacts
		// Of all facts.
		seen, looked, gone bool
		is                 Condition
		refusal            string // in status and explanation
		health             string // the message; empty: healthy
		missing            bool   // in the explanation
		next               time.Time
	}{
		"holds":                         {PartFacts{Verdict: settled}, true, false, false, Settled, "", "", false, time.Time{}},
		"holds, as was just seen":       {PartFacts{Verdict: settled, Failure: boom, NextTry: later}, true, true, false, Settled, "", "", false, time.Time{}},
		"asked since the look":          {PartFacts{Verdict: settled, Outdated: true}, true, false, false, UnderWay, "", "", true, time.Time{}},
		"under way":                     {PartFacts{}, true, false, false, UnderWay, "", "", true, time.Time{}},
		"waits":                         {PartFacts{Verdict: Verdict{Needs: []state.Part{target}}}, true, false, false, Waiting, "", "", true, time.Time{}},
		"not seen yet":                  {PartFacts{}, false, false, false, Unseen, "", "", true, time.Time{}},
		"not seen by its worker yet":    {PartFacts{Verdict: settled}, false, true, false, Settled, "", "", false, time.Time{}},
		"an attempt failed":             {PartFacts{Failure: boom, NextTry: later}, true, false, false, Failing, "boom", "boom", true, later},
		"an attempt failed, unseen":     {PartFacts{Failure: boom}, false, false, false, Failing, "boom", "boom", true, time.Time{}},
		"stuck":                         {PartFacts{Verdict: stuck}, true, false, false, Failing, "the disk is away", "the disk is away", true, time.Time{}},
		"stuck, and was tried":          {PartFacts{Verdict: stuck, Failure: boom, NextTry: later}, true, false, false, Failing, "boom", "the disk is away", true, later},
		"an end that left something":    {PartFacts{Verdict: Verdict{Settled: true, Problem: "left"}}, true, true, true, Failing, "left", "left", true, time.Time{}},
		"an end that was just seen":     {PartFacts{Verdict: settled}, true, true, true, UnderWay, "", "", true, time.Time{}},
		"something undoes the repairs":  {PartFacts{Losses: 3, Lost: now, Repair: RepairPutOff, NextRepair: later}, true, false, false, Failing, "lost 3 times in a row", "lost 3 times in a row", true, later},
		"repair is off":                 {PartFacts{Losses: 1, Lost: now, Repair: RepairOff}, true, false, false, Failing, "--heal=false", "--heal=false", true, time.Time{}},
		"repair is off, and impossible": {PartFacts{Verdict: stuck, Losses: 1, Lost: now, Repair: RepairOff}, true, false, false, Failing, "the disk is away", "the disk is away", true, time.Time{}},
		"was lost and is there again":   {PartFacts{Verdict: settled, Losses: 1, Lost: now}, true, false, false, Settled, "", "", false, time.Time{}},
	} {
		t.Run(title, func(t *testing.T) {
			want := staged()
			want.Stage.Gone = test.gone
			v := Make(Facts{Want: want, Have: state.Actual{Device: attachedDevice()}, Seen: test.seen, Looked: test.looked, Parts: map[state.Part]PartFacts{stage: test.facts}}, now)
			if v.Worst() != test.is || v.Status().Worst() != test.is {
				t.Errorf("it is %s, and %s in the status, not %s", v.Worst(), v.Status().Worst(), test.is)
			}
			part := v.Status().Parts[0]
			if !strings.Contains(part.Error, test.refusal) || test.refusal == "" && part.Error != "" {
				t.Errorf("the status tells %q, not %q", part.Error, test.refusal)
			}
			if next := part.NextTry; test.next.IsZero() != (next == nil) || next != nil && !next.Equal(test.next) {
				t.Errorf("the next try is at %v, not %v", next, test.next)
			}
			explanation := v.Explanation()
			if obstacles := strings.Join(explanation.InTheWay, " "); !strings.Contains(obstacles, test.refusal) {
				t.Errorf("the explanation tells %q, not %q", obstacles, test.refusal)
			}
			if missing := len(explanation.Missing) > 0; missing != test.missing || missing && !strings.Contains(explanation.Missing[0], string(test.is)) {
				t.Errorf("the explanation misses %q, at condition %s", explanation.Missing, test.is)
			}
			health := v.Health()
			if (len(health) > 0) != (test.health != "") || len(health) > 0 && (!strings.Contains(health[0].Message, test.health) || health[0].Kind != Inaccessible) {
				t.Errorf("the health is %v, not %q", health, test.health)
			}
			if restored := strings.Contains(strings.Join(explanation.Is, " "), "is there again"); restored != (test.facts.Losses > 0 && test.is == Settled) {
				t.Errorf("told as restored: %t", restored)
			}
		})
	}
}

func TestHowOftenItWasLost(t *testing.T) {
	for losses, end := range map[int]string{1: " ago.", 3: " ago, and 3 times in a row."} {
		v := Make(Facts{Want: staged(), Seen: true, Parts: map[state.Part]PartFacts{stage: {Losses: losses, Lost: now.Add(-time.Minute), Repair: RepairOff}}}, now)
		if way := v.Explanation().InTheWay; len(way) == 0 || !strings.HasSuffix(way[len(way)-1], end) {
			t.Errorf("%d losses are told as %q", losses, way)
		}
	}
}

// A growth that names no size is to that of the device.
func TestSizeThatIsAsked(t *testing.T) {
	for bytes, want := range map[int64]string{1: "the size of its device", 2 * gib: "2Gi"} {
		record := staged()
		record.Size = &state.Size{Bytes: bytes}
		v := Make(Facts{Want: record, Seen: true, Parts: map[state.Part]PartFacts{state.SizePart(): {Verdict: Verdict{Settled: true}}}}, now)
		if told := strings.Join(v.Explanation().Asked, " "); !strings.Contains(told, "that it has "+want+".") {
			t.Errorf("%d bytes are told as %q", bytes, told)
		}
		parts := v.Status().Parts
		if size := parts[len(parts)-1]; size.Part != "size" || size.Asked != want || size.asked() != want {
			t.Errorf("the status of %d bytes is %+v", bytes, size)
		}
	}
}

// One error of a look that the volume, an attempt and the plan tell of is told once.
func TestErrorOfALookIsToldOnce(t *testing.T) {
	look := errors.New("volume v: observe: boom")
	parts := map[state.Part]PartFacts{
		stage:  {Verdict: Verdict{Problem: look.Error()}, Failure: errors.New("volume v: stage: observe: boom")},
		target: {Verdict: Verdict{Problem: look.Error()}, Failure: look},
	}
	for _, lookErr := range []error{look, nil} {
		way := Make(Facts{Want: staged(&state.Target{Path: pod}), Seen: true, LookErr: lookErr, Parts: parts}, now).Explanation().InTheWay
		want := []string{"Target " + pod + ": observe: boom.", "Stage: observe: boom."}
		if lookErr != nil {
			want = []string{"The volume cannot be looked at now, so this is what was seen last: volume v: observe: boom."}
		}
		if !slices.Equal(way, want) {
			t.Errorf("with the look's error %v: %q, want %q", lookErr, way, want)
		}
	}
}

func TestWhatComesNext(t *testing.T) {
	facts := Facts{
		Want: staged(&state.Target{Path: pod}), Seen: true,
		Running: &Running{Step: "format for stage", Since: now.Add(-time.Minute), Progress: "half"},
		Planned: []Planned{{"mount for stage", stage}, {"bind for " + target.String(), target}},
		Parts:   map[state.Part]PartFacts{target: {Failure: errors.New("boom"), NextTry: later}},
	}
	want := []string{"Format for stage has been running for 1m0s: half.", "Mount for stage.", "Bind for target " + pod + ", in 1m0s."}
	if got := Make(facts, now).Explanation().Next; !slices.Equal(got, want) {
		t.Errorf("next is %q, not %q", got, want)
	}
	facts.Parts[target] = PartFacts{Failure: errors.New("boom"), NextTry: later, Repair: RepairPutOff, NextRepair: later.Add(time.Minute)}
	if got := Make(facts, now).Explanation().Next[2]; !strings.HasSuffix(got, ", in 2m0s.") {
		t.Errorf("a repair that is put off comes next as %q", got)
	}
	facts.Parts[target] = PartFacts{Repair: RepairOff}
	if got := Make(facts, now).Explanation().Next; len(got) != 2 {
		t.Errorf("with repair switched off next is %q", got)
	}
}

func TestWhatAPersonCanDo(t *testing.T) {
	slow := &Running{Step: "look", Since: now.Add(-time.Hour)}
	goneDevice := attachedDevice()
	goneDevice.Missing = true
	for title, test := range map[string]struct {
		facts      Facts
		unattended bool
		want       string // in the only sentence, or in the first
	}{
		"nothing":                   {Facts{Want: staged(), Parts: map[state.Part]PartFacts{stage: {Verdict: Verdict{Settled: true}}}}, false, "Nothing is left to do."},
		"an orphan":                 {Facts{Want: &state.Volume{ID: "v"}, Have: state.Actual{Device: attachedDevice()}}, false, "`csi-node orphans --clean`"},
		"the file is gone":          {Facts{Want: staged(), Have: state.Actual{Device: goneDevice}, Parts: map[state.Part]PartFacts{stage: {Failure: errors.New("boom")}}}, false, goneDevice.Path + " has all of it"},
		"a step that hangs":         {Facts{Want: staged(), Running: slow}, false, "dmesg"},
		"a step that makes way":     {Facts{Want: staged(), Running: &Running{Step: "look", Since: slow.Since, Progress: "half"}}, false, ""},
		"something is in the way":   {Facts{Want: staged(), Parts: map[state.Part]PartFacts{stage: {Failure: errors.New("boom")}}}, false, "`csi-node volume retry v`"},
		"no plugin runs":            {Facts{Want: staged(), Parts: map[state.Part]PartFacts{stage: {Failure: errors.New("boom")}}}, true, "Start the plugin: it takes up"},
		"no plugin, nothing failed": {Facts{Want: staged(), Parts: map[state.Part]PartFacts{stage: {Verdict: Verdict{Settled: true}}}}, true, "Start the plugin: without it"},
	} {
		test.facts.Seen = true
		v := Make(test.facts, now)
		v.Unattended = test.unattended
		explanation := v.Explanation()
		if got := strings.Join(explanation.YouCan, " "); !strings.Contains(got, test.want) || test.want == "" && got != "" {
			t.Errorf("%s: you can %q, not %q", title, got, test.want)
		}
		if told := strings.Join(explanation.InTheWay, " "); strings.Contains(told, "No plugin runs on this node.") != test.unattended {
			t.Errorf("%s: in the way: %q", title, told)
		}
	}
}

// All targets are one finding, lost data comes first, and the parts are sorted by name.
func TestHealth(t *testing.T) {
	other := state.TargetPart("/pods/2/mount")
	lost := attachedDevice()
	short := state.Device{State: state.DeviceAbsent, Size: gib / 2, Capacity: gib}
	facts := Facts{
		Want: staged(&state.Target{Path: other.Path}, &state.Target{Path: pod}), Looked: true,
		Have:  state.Actual{Device: lost, Contents: state.Contents{Kind: state.ContentsBlank}},
		Parts: map[state.Part]PartFacts{stage: {Verdict: Verdict{Problem: "s"}}, target: {Verdict: Verdict{Problem: "1"}}, other: {Failure: errors.New("2")}},
	}
	facts.Want.Size = &state.Size{Bytes: 2 * gib}
	facts.Parts[state.SizePart()] = PartFacts{Verdict: Verdict{Problem: "z"}}
	want := []Finding{
		{DataLoss, "FilesystemLost", "the volume was formatted as ext4 and is blank now"},
		{Degraded, "SizeNotReached", "z"}, {Inaccessible, "StageUnusable", "s"}, {Degraded, "TargetUnusable", "1; 2"},
	}
	if got := Make(facts, now).Health(); !slices.Equal(got, want) {
		t.Errorf("the health is %v, not %v", got, want)
	}
	got := Make(Facts{Want: &state.Volume{ID: "v"}, Have: state.Actual{Device: short}, Looked: true}, now).Health()
	if want := []Finding{{DataLoss, "BackingTruncated", fmt.Sprintf("the volume has %d bytes of %d", gib/2, gib)}}; !slices.Equal(got, want) {
		t.Errorf("the health of a truncated volume is %v, not %v", got, want)
	}

	// A device that is attached shows its old size, and so does what lies on it.
	cut := attachedDevice()
	cut.Capacity, cut.Lacks = gib, gib/2
	v := Make(Facts{Want: staged(), Have: state.Actual{
		Device: state.Device{State: state.DeviceAbsent, Capacity: gib}, Layer: "luks", Lower: []state.Element{{Device: cut}},
	}, Looked: true}, now)
	if got, want := v.Health(), []Finding{{DataLoss, "BackingTruncated", fmt.Sprintf("the volume has %d bytes of %d", gib/2, gib)}}; !slices.Equal(got, want) {
		t.Errorf("the health of a volume that was truncated under its device is %v, not %v", got, want)
	}
	if text := strings.Join(v.Explanation().Is, "\n"); !strings.Contains(text, "1Gi, of which the last 512Mi are lost") {
		t.Errorf("it is explained as %q", text)
	}

	// A layer that is not open yet has no size.
	whole := attachedDevice()
	v.Have.Lower[0].Device = whole
	if got := v.Health(); len(got) > 0 {
		t.Errorf("the health of a volume whose layer is not open is %v", got)
	}
}

// Of what could not be read nothing is claimed, least of all that there is no data.
func TestNothingIsClaimedOfWhatIsNotKnown(t *testing.T) {
	for _, d := range []state.Device{{}, {State: state.DeviceAbsent}, {State: state.DeviceAttached, Path: "/dev/loop1", Size: gib + 1, Err: errors.New("boom")}} {
		text := strings.Join(Make(Facts{Want: staged(), Have: state.Actual{Device: d}, Looked: true}, now).Explanation().Is, "\n")
		for _, claim := range []string{"never formatted", " 0 bytes", "nothing is mounted"} {
			if strings.Contains(text, claim) {
				t.Errorf("of %+v is said %q", d, text)
			}
		}
		for _, words := range []string{"What its data is, and whether it was ever formatted, is not known now.", "What is at " + place + " is not known."} {
			if !strings.Contains(text, words) {
				t.Errorf("of %+v is said %q, and not %q", d, text, words)
			}
		}
	}
}

func TestStorageHealth(t *testing.T) {
	full, away := state.Errorf(state.ResourceExhausted, "full"), errors.New("away")
	alone := fmt.Errorf("group: %w", &state.Degraded{Err: errors.New("alone")})
	both := errors.Join(full, alone)
	for title, test := range map[string]struct {
		places []error
		serves bool // each of them
		want   []Finding
	}{
		"well":          {[]error{nil, nil}, true, nil},
		"full":          {[]error{nil, full}, true, []Finding{{Degraded, "PoolFull", "full"}}},
		"degraded":      {[]error{nil, alone}, true, []Finding{{Degraded, "PoolDegraded", "group: alone"}}},
		"both":          {[]error{full, alone}, true, []Finding{{Degraded, "PoolFull", "full"}, {Degraded, "PoolDegraded", "group: alone"}}},
		"in one error":  {[]error{both}, true, []Finding{{Degraded, "PoolDegraded", "full\ngroup: alone"}}},
		"away":          {[]error{away}, false, []Finding{{Inaccessible, "PoolUnusable", "away"}}},
		"full and away": {[]error{full, away}, false, []Finding{{Degraded, "PoolFull", "full"}, {Inaccessible, "PoolUnusable", "away"}}},
	} {
		if got := StorageHealth(test.places); !slices.Equal(got, test.want) {
			t.Errorf("%s: %v", title, got)
		}
		if serves := !slices.ContainsFunc(test.places, func(err error) bool { return !Serves(err) }); serves != test.serves {
			t.Errorf("%s: serves: %t", title, serves)
		}
	}
}

// TestSizeWithoutCapacity: a backend need not know what it promised.
func TestSizeWithoutCapacity(t *testing.T) {
	d := attachedDevice()
	d.Capacity = 0
	v := Make(Facts{Want: staged(), Have: state.Actual{Device: d}, Seen: true}, now)
	if is := strings.Join(v.Explanation().Is, " "); !strings.Contains(is, "Its data is /pool/v: 1Gi, formatted as ext4.") {
		t.Errorf("the explanation tells %q", is)
	}
}
