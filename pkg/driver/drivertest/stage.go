package drivertest

import (
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

// BenchmarkStage times the stage of a volume that nobody has staged yet, once it is
// formatted ("staged"), beside what anybody has to do for it by hand ("bare"): to mount it
// at a directory. undo takes that back, and is not timed.
func BenchmarkStage(b *testing.B, v *harness.Volume, bare, undo func(b *testing.B, dir string)) {
	staged := func(b *testing.B) {
		if err := v.Stage(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	unstaged := func(b *testing.B) {
		if err := v.Unstage(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
	staged(b) // which formats it
	unstaged(b)
	b.Run("bare", func(b *testing.B) {
		dir := b.TempDir()
		for b.Loop() {
			bare(b, dir)
			b.StopTimer()
			undo(b, dir)
			b.StartTimer()
		}
	})
	b.Run("staged", func(b *testing.B) {
		for b.Loop() {
			staged(b)
			b.StopTimer()
			unstaged(b)
			b.StartTimer()
		}
	})
}
