package reconciler_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// A volume that is larger than the limit of a size, or would be, refuses it, unless
// it has that size already.
func TestPlanSizeWithinItsLimit(t *testing.T) {
	mounted := planWorld{
		stage: stageWorld{want: wantThere}, at: placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}}, size: sizeWorld{want: true},
		device: deviceWorld{state: isAttached}, contents: contentsWorld{kind: holdsExt4},
	}
	for _, tt := range []struct {
		bytes, limit, capacity, unit int64 // of a device of 100 bytes
		class                        state.Class
		words                        string
	}{
		{50, 99, 100, 0, state.OutOfRange, "never shrinks"},
		{50, 150, 200, 0, state.OutOfRange, "never shrinks"},
		{150, 200, 100, 0, state.OutOfRange, "rounded up"},
		{150, 4096, 100, 0, 0, ""},
		{150, 4096, 100, 6000, state.OutOfRange, "would have 6000 bytes"},
		{150, 6000, 100, 6000, 0, ""},
		{50, 100, 100, 0, 0, ""},
		{50, 100, 100, 6000, 0, ""},
	} {
		c := mounted.look()
		c.want.Size.Bytes, c.want.Size.Limit, c.have.Device.Capacity, c.have.Device.Unit = tt.bytes, tt.limit, tt.capacity, tt.unit
		plan := reconciler.MakePlan(c.want, c.have)
		v := plan.Verdicts.Of(state.SizePart())
		if told := v.Problem.Text != ""; told != (tt.words != "") || told && (v.Problem.Class != tt.class || !strings.Contains(v.Problem.Text, tt.words)) {
			t.Errorf("%+v: %+v", tt, v)
		}
		if grows := slices.Contains(plan.Steps, reconciler.Step{Action: reconciler.GrowDevice, Part: state.SizePart()}); grows != (tt.words == "" && tt.bytes > 100) {
			t.Errorf("%+v: steps %v", tt, plan.Steps)
		}
	}
}

// A target that was asked for while the volume was to be staged otherwise is not bound: the stage
// has nothing for it.
func TestPlanTargetOfAnotherStage(t *testing.T) {
	block, mount := state.Capability{Access: state.BlockAccess}, state.Capability{Access: state.MountAccess, FSType: "ext4"}
	device := state.Device{State: state.DeviceAttached, Number: state.DeviceNumber{Major: 7}}
	for _, tt := range []struct{ staged, published state.Capability }{{block, mount}, {mount, block}} {
		want := &state.Volume{ID: "v", Stage: &state.Stage{Path: "/stage", Capability: tt.staged}, Targets: map[string]*state.Target{"/pod": {Path: "/pod", Capability: tt.published}}}
		have := state.Actual{Device: device, View: state.Device{State: state.DeviceAbsent}, Stage: state.Mountpoint{File: state.Directory, Empty: true}}
		have.Targets.Set("/pod", state.Mountpoint{File: state.NoFile})
		if tt.staged.Access == state.MountAccess {
			have.Stage.Mounts = []state.Mount{{Device: device.Number, FSType: "ext4", Root: "/"}}
			have.Contents = state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4"}
		}
		plan := reconciler.MakePlan(want, have)
		if v := plan.Verdicts.Of(state.TargetPart("/pod")); len(plan.Steps) > 0 || v.Problem.Class != state.FailedPrecondition || !strings.Contains(v.Problem.Text, fmt.Sprint("staged as ", tt.staged, ", not as ", tt.published)) {
			t.Errorf("%v, %+v", plan.Steps, v)
		}
	}
}

// A file system that has a number of its own does not tell any more which disk it was on,
// once that was pulled: at the volume's path it is the volume's, if its disk is gone, too.
func TestPlanPulledDisk(t *testing.T) {
	pulled := state.Mount{Device: state.DeviceNumber{Minor: 40}, FSType: "btrfs", Source: "/dev/sdb", Root: "/", Pulled: true}
	gone := state.Device{State: state.DeviceAbsent, Number: state.DeviceNumber{Major: 8, Minor: 16}}
	for name, tt := range map[string]struct {
		change func(*state.Mount, *state.Device)
		ours   bool
	}{
		"pulled":            {func(*state.Mount, *state.Device) {}, true},
		"never attached":    {func(_ *state.Mount, d *state.Device) { d.Number = state.DeviceNumber{} }, false},
		"another type":      {func(m *state.Mount, _ *state.Device) { m.FSType = "zfs" }, false},
		"a part of another": {func(m *state.Mount, _ *state.Device) { m.Root = "/directory" }, false},
		"its disk is there": {func(m *state.Mount, _ *state.Device) { m.Pulled = false }, false},
	} {
		t.Run(name, func(t *testing.T) {
			m, d := pulled, gone
			tt.change(&m, &d)
			stage := &state.Stage{Path: "/k/stage", Capability: state.Capability{Access: state.MountAccess, FSType: "btrfs"}}
			stage.Gone = true
			plan := reconciler.MakePlan(&state.Volume{ID: "v", Stage: stage}, state.Actual{
				Device: d, Stage: state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}, View: state.Device{State: state.DeviceAbsent},
			})
			if unmounts := slices.Contains(plan.Steps, reconciler.Step{Action: reconciler.Unmount, Part: state.StagePart()}); unmounts != tt.ours {
				t.Errorf("steps %v, %+v", plan.Steps, plan.Verdicts)
			}
		})
	}
}

// A disk that tells no identity, and was given another's path, is known by the file system that
// was made on the volume's: what is there is not mounted.
func TestPlanAnotherDiskAtThePath(t *testing.T) {
	for made, mounts := range map[string]bool{"": true, "its": true, "another": false} {
		t.Run(made, func(t *testing.T) {
			stage := &state.Stage{Path: "/k/stage", Capability: state.Capability{Access: state.MountAccess, FSType: "ext4"}}
			plan := reconciler.MakePlan(&state.Volume{ID: "v", Stage: stage}, state.Actual{
				Device:   state.Device{State: state.DeviceAttached, Path: "/dev/vdb", Number: state.DeviceNumber{Major: 252, Minor: 16}, Noted: true, Formatted: "ext4", MadeUUID: made},
				View:     state.Device{State: state.DeviceAbsent},
				Stage:    state.Mountpoint{File: state.Directory, Empty: true},
				Contents: state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", UUID: "its"},
			})
			if got := slices.Contains(plan.Steps, reconciler.Step{Action: reconciler.Mount, Part: state.StagePart()}); got != mounts {
				t.Errorf("steps %v, %+v", plan.Steps, plan.Verdicts)
			}
			if p := plan.Verdicts.Of(state.StagePart()).Problem; !mounts && p.Class != state.FailedPrecondition {
				t.Errorf("%+v", p)
			}
		})
	}
}

// A pod sees a disk that takes commands in spite of its read-only mode by a view of it, unless
// it was given the disk itself before.
func TestPlanReadOnlyDiskThatTakesCommands(t *testing.T) {
	disk := state.Device{State: state.DeviceAttached, Path: "/dev/sdb", Number: state.DeviceNumber{Major: 8, Minor: 16}, ReadOnly: true}
	block := state.Capability{Access: state.BlockAccess}
	for name, tt := range map[string]struct {
		commands bool
		shown    state.DeviceNumber // before
		step     reconciler.Action
	}{
		"it takes none":                        {false, state.DeviceNumber{}, reconciler.Bind},
		"it takes some":                        {true, state.DeviceNumber{}, reconciler.AttachView},
		"it is shown itself":                   {true, disk.Number, reconciler.Bind},
		"it takes some, and its view is shown": {true, state.DeviceNumber{Major: 7}, reconciler.AttachView},
	} {
		t.Run(name, func(t *testing.T) {
			d := disk
			d.Commands = tt.commands
			stage := &state.Stage{Path: "/k/stage", Capability: block, ReadOnly: true}
			stage.Accepted = true
			target := &state.Target{Path: "/k/pod", Capability: block, SeenDevice: state.SeenDevice{Device: tt.shown}}
			target.Accepted = tt.shown != state.DeviceNumber{}
			var seen state.Mountpoints
			seen.Set(target.Path, state.Mountpoint{File: state.RegularFile, Empty: true})
			plan := reconciler.MakePlan(&state.Volume{ID: "v", Stage: stage, Targets: map[string]*state.Target{target.Path: target}}, state.Actual{
				Device: d, View: state.Device{State: state.DeviceAbsent}, Stage: state.Mountpoint{File: state.Directory, Empty: true},
				Targets: seen,
			})
			if !slices.Contains(plan.Steps, reconciler.Step{Action: tt.step, Part: state.TargetPart(target.Path)}) {
				t.Errorf("steps %v, %+v", plan.Steps, plan.Verdicts)
			}
		})
	}
}

// A volume that was used without a layer for which its context asks has its data: it is not told
// that they are lost.
func TestPlanLayerOfAVolumeThatHadNone(t *testing.T) {
	for formatted, words := range map[string]string{
		"ext4": "was formatted as ext4 before, without the layer L",
		"L":    "had the layer L before, and does not have it now: its data is lost",
	} {
		source := state.Device{State: state.DeviceAttached, Number: state.DeviceNumber{Major: 7}, Formatted: formatted}
		want := &state.Volume{ID: "v", Stage: &state.Stage{Path: "/k/stage", Capability: state.Capability{Access: state.MountAccess, FSType: "ext4"}}}
		plan := reconciler.MakePlan(want, state.Actual{
			Device: state.Device{State: state.DeviceAbsent, Unmade: true}, Layer: "L", Lower: []state.Element{{Device: source}},
			View: state.Device{State: state.DeviceAbsent}, Stage: state.Mountpoint{File: state.Directory, Empty: true},
			Beneath: state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4"},
		})
		if v := plan.Verdicts.Of(state.StagePart()); v.Problem.Class != state.FailedPrecondition || !strings.Contains(v.Problem.Text, words) || len(plan.Steps) > 0 {
			t.Errorf("%s: %+v, with the steps %v", formatted, v, plan.Steps)
		}
	}
}

// BenchmarkMakePlan plans for a volume at rest with two targets, which is what
// a republish and a resync cost.
func BenchmarkMakePlan(b *testing.B) {
	at := func(m mountWorld) placeWorld {
		return placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{m}}
	}
	atRest := planWorld{
		stage: stageWorld{want: wantThere, accepted: true}, at: at(mountedHere), size: sizeWorld{want: true, accepted: true},
		targets: [2]targetWorld{{want: wantThere, accepted: true, at: at(mountedHere)}, {want: wantThere, accepted: true, readOnly: true, at: at(mountedRO)}},
		device:  deviceWorld{state: isAttached}, contents: contentsWorld{kind: holdsExt4},
	}
	c := atRest.look()
	if len(c.plan.Steps) > 0 {
		b.Fatalf("not at rest: %v", c.plan.Steps)
	}
	b.ReportAllocs()
	for b.Loop() {
		reconciler.MakePlan(c.want, c.have)
	}
}

// BenchmarkMakePlanOfManyTargets plans for a volume that many pods have, and asks for each verdict.
func BenchmarkMakePlanOfManyTargets(b *testing.B) {
	w := planWorld{
		stage:   stageWorld{want: wantThere, accepted: true},
		at:      placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}},
		targets: [2]targetWorld{{want: wantThere, accepted: true, at: placeWorld{file: fileEmptyDirectory, mounts: [2]mountWorld{mountedHere}}}},
		device:  deviceWorld{state: isAttached}, contents: contentsWorld{kind: holdsExt4},
	}
	for _, count := range []int{1, 100, 1000} {
		c := w.look()
		one, at := c.want.Targets[planPaths[0]], c.have.Targets.At(planPaths[0])
		for i := range count - 1 {
			more := *one
			more.Path = fmt.Sprintf("%s/%d", planPaths[0], i)
			c.want.Targets[more.Path] = &more
			c.have.Targets.Set(more.Path, at)
		}
		parts := c.want.Parts()
		b.Run(fmt.Sprint(count), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				plan := reconciler.MakePlan(c.want, c.have)
				for _, part := range parts {
					if !plan.Verdicts.Of(part).Settled {
						b.Fatalf("not at rest: %s", part)
					}
				}
			}
		})
	}
}
