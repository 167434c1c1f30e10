package reconciler

import (
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// For a stage that nobody asked for nothing is done but to adopt it, whatever is
// there, and only what stands is adopted; what goes, goes.
func TestNothingIsDoneForAProvisionalStage(t *testing.T) {
	device, foreign := state.DeviceNumber{Major: 7, Minor: 1}, state.DeviceNumber{Major: 8, Minor: 1}
	mounted := func(n state.DeviceNumber, change ...func(*state.Mount)) state.Mountpoint {
		m := state.Mount{Device: n, Root: "/", FSType: "ext4"}
		for _, c := range change {
			c(&m)
		}
		return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}
	}
	node := func(m *state.Mount) { m.Node = true }
	broken := func(m *state.Mount) { m.Corrupt = true }
	places := []state.Mountpoint{
		{File: state.NoFile}, {File: state.Directory, Empty: true}, mounted(device), mounted(device, broken), mounted(device, node), mounted(foreign),
		{Err: state.Errorf(state.DeadlineExceeded, "hangs")}, {Err: state.Errorf(state.FailedPrecondition, "no directory")},
	}
	contents := []state.Contents{{Kind: state.ContentsBlank}, {Kind: state.ContentsFilesystem, FSType: "ext4", Growable: true, GrowsMounted: true}, {Err: errBoom}}
	adopted, plans := 0, 0
	for _, status := range []state.DeviceState{state.DeviceAbsent, state.DeviceAttached, state.DeviceDetaching, state.DeviceForeign} {
		for bits := range 1 << 6 {
			for _, stage := range places {
				for _, target := range places {
					for _, c := range contents {
						has := func(n int) bool { return bits>>n&1 == 1 }
						d := state.Device{State: status, Missing: has(0), ReadOnly: has(1), Size: gib, Capacity: gib, Held: has(5)}
						have := state.Actual{Device: d, Contents: c, Stage: stage, Targets: map[string]state.Mountpoint{"/a": target, "/b": target}}
						if d.Attached() || status == state.DeviceDetaching {
							have.Device.Number = device
						}
						if has(2) {
							have.View = state.Device{State: state.DeviceAttached, Number: state.DeviceNumber{Major: 7, Minor: 2}, ReadOnly: true}
						}
						want := &state.Volume{ID: "v", Revision: 1}
						ask := mountCapability()
						if has(3) {
							ask = blockCapability()
						}
						require.NoError(t, want.AskPublish(&state.Target{Path: "/a", Capability: ask, ReadOnly: has(4)}, "/stage", time.Time{}))
						require.NoError(t, want.AskSize(2*gib, 0, time.Time{}))
						require.NoError(t, want.AskUnpublish("/b", time.Time{}))
						plan := MakePlan(want, have)
						plans++
						for _, step := range plan.Steps {
							switch {
							case step.Part == state.TargetPart("/b"):
							case step.Action != Adopt:
								t.Fatalf("step %s for %+v", step, have)
							case !d.Attached(), ask.Access == state.MountAccess && (len(stage.Mounts) == 0 || !stage.Mounts[0].Is(device) || stage.Mounts[0].Node || stage.Mounts[0].Corrupt):
								t.Fatalf("adopted is %+v", have)
							default:
								adopted++
							}
						}
						for _, part := range []state.Part{state.StagePart(), state.TargetPart("/a"), state.SizePart()} {
							if plan.Verdicts[part].Settled {
								t.Fatalf("%s is settled by %+v", part, have)
							}
						}
					}
				}
			}
		}
	}
	if adopted == 0 {
		t.Errorf("nothing was adopted in %d plans", plans)
	}
}
