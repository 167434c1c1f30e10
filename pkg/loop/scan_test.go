package loop

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/internal/hang"
)

// Two scans that meet a device which does not answer: the first waits for it,
// the later ones do not wait again.
func TestScanWaitsOnceForAHungDevice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, dead := &Devices{}, make(chan struct{})
		defer close(dead)
		go func() {
			_, _, err := s.looks.Join(context.WithoutCancel(t.Context()), "loop1", hang.NoLimit, func() (*Device, error) { <-dead; return nil, nil })
			if err != nil {
				t.Error(err)
			}
		}()
		synctest.Wait()
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

// A device that hangs is logged once, and once more when it has answered in between.
func TestAHungDeviceIsNewsOnce(t *testing.T) {
	s := &Devices{unresponsive: map[string]bool{}}
	for i, step := range []struct{ silent, news bool }{{false, false}, {true, true}, {true, false}, {true, false}, {false, true}, {false, false}, {true, true}} {
		if news := s.setUnresponsive("loop1", step.silent); news != step.news {
			t.Errorf("look %d: news %t", i, news)
		}
	}
}
