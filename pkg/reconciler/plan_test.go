package reconciler_test

import (
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
		bytes, limit, capacity int64 // of a device of 100 bytes
		class                  state.Class
		words                  string
	}{
		{50, 99, 100, state.OutOfRange, "never shrinks"},
		{50, 150, 200, state.OutOfRange, "never shrinks"},
		{150, 200, 100, state.OutOfRange, "rounded up"},
		{150, 4096, 100, 0, ""},
		{50, 100, 100, 0, ""},
	} {
		c := mounted.look()
		c.want.Size.Bytes, c.want.Size.Limit, c.have.Device.Capacity = tt.bytes, tt.limit, tt.capacity
		plan := reconciler.MakePlan(c.want, c.have)
		v := plan.Verdicts[state.SizePart()]
		if told := v.Problem.Text != ""; told != (tt.words != "") || told && (v.Problem.Class != tt.class || !strings.Contains(v.Problem.Text, tt.words)) {
			t.Errorf("%+v: %+v", tt, v)
		}
		if grows := slices.Contains(plan.Steps, reconciler.Step{Action: reconciler.GrowDevice, Part: state.SizePart()}); grows != (tt.words == "" && tt.bytes > 100) {
			t.Errorf("%+v: steps %v", tt, plan.Steps)
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
