package reconciler_test

import (
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
)

// BenchmarkMakePlan plans for a volume at rest with two targets, which is what
// a republish and a resync cost.
func BenchmarkMakePlan(b *testing.B) {
	want := volume(staged(), published(podA, accepted), published(podB, readOnly, accepted), size(100))
	have := actual(attached(), ext4(), stageIs(mounted(rw)), targetIs(podA, mounted(rw)), targetIs(podB, mounted(ro)))
	if plan := reconciler.MakePlan(want, have); len(plan.Steps) > 0 {
		b.Fatalf("not at rest: %v", plan.Steps)
	}
	b.ReportAllocs()
	for b.Loop() {
		reconciler.MakePlan(want, have)
	}
}
