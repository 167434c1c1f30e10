package report

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestTellRefusal(t *testing.T) {
	r := Refusal{Volume: "v", Call: "NodeStageVolume", Code: "InvalidArgument", Error: "volume v: mount flag\n\"bad\"", Since: now.Add(-time.Minute), At: now.Add(-3 * time.Second), Times: 1}
	if got, want := r.Tell(now), `NodeStageVolume was refused 3s ago with InvalidArgument: mount flag "bad"`; got != want {
		t.Errorf("told is %q, not %q", got, want)
	}
	r.Times, r.Pod = 4, "default/writer"
	if got, want := r.Tell(now), `NodeStageVolume for pod default/writer was refused 3s ago with InvalidArgument, 4 times since 1m0s ago: mount flag "bad"`; got != want {
		t.Errorf("told is %q, not %q", got, want)
	}
}

// What is still worked on is told by its part, and not once more.
func TestPartTellsOfARefusal(t *testing.T) {
	v := Make(Facts{Want: staged(), Seen: true, Parts: map[state.Part]PartFacts{stage: {Failure: errors.New("no room")}}}, now)
	if !v.Tells(Refusal{Error: "no room"}) || v.Tells(Refusal{Error: "bad flag"}) || (Volume{}).Tells(Refusal{Error: "no room"}) {
		t.Error("a part tells of what it does not, or not of what it does")
	}
}

// A volume of which nothing is asked is explained by the call that was refused.
func TestExplainARefusal(t *testing.T) {
	v := Make(Facts{Want: &state.Volume{ID: "v"}, Have: state.Actual{Device: state.Device{State: state.DeviceAbsent}}, Looked: true}, now)
	v.Refusal = &Refusal{Volume: "v", Call: "NodeStageVolume", Code: "InvalidArgument", Error: "bad flag", Since: now, At: now, Times: 1}
	told := v.Explanation()
	if len(told.Refused) != 1 || told.Refused[0] != "NodeStageVolume was refused 0s ago with InvalidArgument: bad flag." {
		t.Errorf("told as refused is %q", told.Refused)
	}
	if words := strings.Join(told.YouCan, " "); !strings.Contains(words, "Put right what the refusal names") || strings.Contains(words, "kubectl describe") {
		t.Errorf("you can %q", words)
	}
	var text strings.Builder
	if err := told.Print(&text); err != nil || !strings.Contains(text.String(), "\nRefused last:\n  NodeStageVolume was refused") {
		t.Errorf("prints %s (%v)", text.String(), err)
	}
	// Of a volume that is as asked it is history, unless somebody waits for the call.
	v = Make(Facts{Want: staged(), Have: state.Actual{Device: attachedDevice()}, Seen: true, Parts: map[state.Part]PartFacts{stage: {Verdict: Verdict{Settled: true}}}}, now)
	v.Refusal = &Refusal{Volume: "v", Call: "NodePublishVolume", Code: "FailedPrecondition", Error: "busy", Since: now, At: now, Times: 1}
	if told := v.Explanation(); len(told.Refused) != 1 || len(told.YouCan) != 2 || told.YouCan[0] != "Nothing is left to do." || !strings.HasPrefix(told.YouCan[1], "If a pod still waits for the call that was refused") {
		t.Errorf("told is %+v", told)
	}
}

// What many volumes have in common is told once, unless each is wanted.
func TestTellRefusals(t *testing.T) {
	now := time.Now()
	refused := func(volume, call, why string, ago time.Duration) Refusal {
		return Refusal{Volume: volume, Call: call, Pod: "ns/" + volume, Code: "InvalidArgument", Error: "volume " + volume + ": " + why, At: now.Add(-ago), Times: 2}
	}
	all := []Refusal{refused("a", "NodeStageVolume", "bad", 3*time.Second), refused("b", "NodeStageVolume", "worse", 0), refused("c", "NodeStageVolume", "bad", time.Second),
		refused("d", "CreateVolume", "bad", 0), refused("e", "NodeStageVolume", "bad", 4*time.Second), refused("f", "NodeStageVolume", "bad", 2*time.Second), refused("g", "CreateVolume", "bad", time.Second)}
	all[2].Claim, all[3].Pod = "ns/claim", ""
	got, want := tellRefusals(all, false, now), []string{
		"volumes a (pod ns/a), c (ns/claim), e (pod ns/e) and 1 more: NodeStageVolume was refused 1s ago with InvalidArgument: bad",
		"volume b: " + all[1].Tell(now),
		"volumes d, g (pod ns/g): CreateVolume was refused 0s ago with InvalidArgument: bad",
	}
	if !slices.Equal(got, want) {
		t.Errorf("tells %q, not %q", got, want)
	}
	got = tellRefusals(all, true, now)
	for i, r := range all {
		if want := "volume " + inFull(r.Volume, r.Claim) + ": " + r.Tell(now); len(got) != len(all) || got[i] != want {
			t.Fatalf("of each tells %q, not %q", got, want)
		}
	}
}
