package driver

import "testing"

func TestRestBeginsOnceAfterABusyTime(t *testing.T) {
	const mib = 1 << 20
	var r idleDetector
	for i, tick := range []struct {
		allocated uint64 // since the tick before
		begins    bool
	}{
		{5 * mib, false}, {0, false}, // a start is no busy time
		{100 * mib, false}, {2 * mib, false}, {1000, true}, {1000, false}, {0, false},
		{10 * mib, false}, {0, false},
		{10 * mib, false}, {0, true},
	} {
		if got := r.begins(r.last + tick.allocated); got != tick.begins {
			t.Errorf("tick %d: %t", i, got)
		}
	}
}
