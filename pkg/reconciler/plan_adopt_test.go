package reconciler_test

import (
	"errors"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// For a stage that nobody asked for nothing is done but to adopt it, whatever is
// there, and only what is staged is adopted. What is to go, goes.
func TestNothingIsDoneForAProvisionalStage(t *testing.T) {
	var asked []*state.Volume
	for _, block := range []bool{false, true} {
		for _, readOnly := range []bool{false, true} {
			want := &state.Volume{ID: "v", Revision: 1}
			require.NoError(t, errors.Join(
				want.AskPublish(&state.Target{Path: planPathA, Capability: planCapability(block, false), ReadOnly: readOnly}, planStagePath, time.Time{}),
				want.AskSize(200, 0, time.Time{}), want.AskUnpublish(planPathB, time.Time{})))
			asked = append(asked, want)
		}
	}
	adopted, plans := 0, 0
	for w := range provisionalWorlds {
		have := w.look().have
		mounts := have.Stage.Mounts
		whole := len(mounts) > 0 && wholeOf(mounts[0], have.Device.Number) && !mounts[0].Corrupt
		for _, want := range asked {
			plan := reconciler.MakePlan(want, have)
			plans++
			for _, step := range plan.Steps {
				switch {
				case step.Part == state.TargetPart(planPathB):
				case step.Action != reconciler.Adopt:
					t.Fatalf("step %s for %+v", step, have)
				case !have.Device.Attached(), want.Stage.Capability.Access == state.MountAccess && !whole:
					t.Fatalf("adopted is %+v", have)
				default:
					adopted++
				}
			}
			for _, part := range []state.Part{state.StagePart(), state.TargetPart(planPathA), state.SizePart()} {
				if plan.Verdicts.Of(part).Settled {
					t.Fatalf("%s is settled by %+v", part, have)
				}
			}
		}
	}
	if adopted == 0 {
		t.Errorf("nothing was adopted in %d plans", plans)
	}
}

// provisionalWorlds ranges over what can be there of a volume that has no record.
func provisionalWorlds(yield func(planWorld) bool) {
	targets := append(placesOf(fileEmptyDirectory, [2]mountWorld{}, [2]mountWorld{mountedHere}), placeWorld{err: errNow})
	for _, device := range deviceWorlds() {
		for _, at := range stagePlaces {
			for _, target := range targets {
				for _, contents := range []contentsWorld{{kind: holdsExt4, growable: true, growsMounted: true}, {kind: holdsUnreadable}} {
					there := targetWorld{want: wantThere, at: target}
					w := planWorld{stage: stageWorld{want: wantThere}, at: at, targets: [2]targetWorld{there, there}, device: device, contents: contents}
					if !yield(w) {
						return
					}
				}
			}
		}
	}
}
