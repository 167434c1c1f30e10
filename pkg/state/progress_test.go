package state

import (
	"testing"
	"time"
)

func TestTenths(t *testing.T) {
	const total = int64(1000)
	for done, want := range map[int64]string{0: "0 %", 99: "0 %", 550: "50 %", total: "100 %"} {
		if got := Tenths(done, total); got != want {
			t.Errorf("%d of %d is %s, not %s", done, total, got, want)
		}
	}
	if got := Tenths(0, 0); got != "0 %" {
		t.Errorf("nothing of nothing is %s", got)
	}
}

func TestClock(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678, time.FixedZone("", 3600))
	if got := Clock(at); got != "2026-01-02T02:04:05Z" {
		t.Errorf("the moment is %s", got)
	}
}
