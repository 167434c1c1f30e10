package driver

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/test/require"
)

// readiness scrapes a gauge of needs, as Prometheus does.
func readiness(t *testing.T, m *metrics) (ready float64) {
	t.Helper()
	families, err := m.registry.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() == "csi_node_ready" {
			return f.GetMetric()[0].GetGauge().GetValue()
		}
	}
	t.Error("there is no csi_node_ready")
	return -1
}

// A scrape tells what the probe `ready` does, and takes part in its round of checks. It is answered in
// time while that hangs, and by one that is only slow with what the last round found.
func TestReadyInTheMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var rounds int
		var slow time.Duration
		var hung chan struct{}
		var lacks error
		n := &needs{checks: []func(context.Context) error{func(context.Context) error {
			rounds++
			time.Sleep(slow)
			if hung != nil {
				<-hung
			}
			return lacks
		}}}
		m := newMetrics("v1")
		m.addReadiness(n)
		m.addBackend("hung", func() ([]devices.Measurement, error) { // scrapes wait for both at a time
			if hung != nil {
				<-hung
			}
			return nil, nil
		})
		settle := func() {
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		check := func(title string, want float64, took time.Duration) {
			t.Helper()
			begin := time.Now()
			if got := readiness(t, m); got != want || time.Since(begin) != took {
				t.Errorf("%s: after %s it is %v", title, time.Since(begin), got)
			}
		}
		check("well", 1, 0)
		lacks = errors.New("away")
		check("away", 0, 0)

		slow = measureWait + time.Second/2
		check("away, and slow to say it", 0, measureWait)
		settle()
		lacks = nil
		check("back, and slow to say it", 0, measureWait)
		settle()
		check("back for a while", 1, measureWait)
		settle()

		lacks, slow, hung, rounds = errors.New("away"), 0, make(chan struct{}), 0
		for range 3 {
			if err := n.missing(t.Context()); err != nil {
				t.Error(err)
			}
			check("hung", 1, measureWait)
		}
		close(hung)
		synctest.Wait()
		if rounds != 1 {
			t.Errorf("%d rounds hung", rounds)
		}
		check("hung no more", 0, 0)
	})
}

// Of storage that was away and then hangs the probe `ready` says that the plugin is ready. So does a scrape.
func TestReadyOnceWhatIsAwayHangs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung chan struct{}
		n := &needs{checks: []func(context.Context) error{func(context.Context) error {
			if hung != nil {
				<-hung
			}
			return errors.New("away")
		}}}
		if n.ready() {
			t.Error("it is ready")
		}
		hung = make(chan struct{})
		if n.ready() {
			t.Error("it is ready, and nobody knows that it hangs")
		}
		time.Sleep(checkTime)
		if !n.ready() || n.missing(t.Context()) != nil {
			t.Error("it is not ready")
		}
		close(hung)
	})
}

// A check that hangs does not make the plugin unready, and probes do not pile
// up behind it.
func TestHungCheck(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hang, looks := make(chan struct{}), 0
		n := &needs{checks: []func(context.Context) error{func(context.Context) error { looks++; <-hang; return nil }}}
		for range 5 {
			if err := n.missing(t.Context()); err != nil {
				t.Error(err)
			}
		}
		close(hang)
		synctest.Wait()
		if looks != 1 {
			t.Errorf("%d checks hung", looks)
		}
	})
}
