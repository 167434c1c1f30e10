package loop

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// Two scans that meet a device which does not answer: the first waits for it,
// the later ones do not wait again.
func TestScanWaitsOnceForAHungDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &Devices{looks: map[string]*look{"loop1": {since: time.Now(), done: make(chan struct{})}}}
		for _, want := range []time.Duration{lookLimit, 0} {
			start := time.Now()
			_, err := s.askWithin(t.Context(), "loop1")
			if err == nil || !strings.Contains(err.Error(), "loop1 does not tell its backing") {
				t.Errorf("asked: %v", err)
			}
			if waited := time.Since(start); waited != want {
				t.Errorf("waited for %s, want %s", waited, want)
			}
		}
	})
}
