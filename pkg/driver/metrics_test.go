package driver

import (
	"errors"
	"reflect"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/require"
)

// scrape returns the values of a backend's metrics, by name and label.
func scrape(t *testing.T, p *backendUse) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(p)
	families, err := registry.Gather()
	require.NoError(t, err)
	values := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			values[name] = m.GetGauge().GetValue()
		}
	}
	return values
}

// Of a counter that appears with the first losses Prometheus would see no increase.
func TestRepairsAreCountedFromZero(t *testing.T) {
	families, err := newMetrics("v1").registry.Gather()
	require.NoError(t, err)
	at := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == "csi_node_repairs_total" })
	if at < 0 || len(families[at].GetMetric()) != 2 {
		t.Errorf("before a repair there are %v", families)
	}
}

func TestBackendMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		free, err := 0.0, errors.New("no pool yet")
		p := newBackendUse("two-words", func() (all []devices.Measurement, _ error) {
			if free > 0 {
				all = []devices.Measurement{
					{Name: "free_bytes", Help: "Free.", Value: free},
					{Name: "volumes", Help: "Volumes.", Labels: map[string]string{"provisioning": "thick"}, Value: 1},
					{Name: "volumes", Help: "Volumes.", Labels: map[string]string{"provisioning": "thin"}, Value: 2},
				}
			}
			return all, err
		})
		begun := map[string]float64{"csi_node_two_words_seen_timestamp_seconds": float64(time.Now().Unix())}
		time.Sleep(time.Hour)
		if got := scrape(t, p); !reflect.DeepEqual(got, begun) {
			t.Errorf("before it was ever measured: %v, not %v", got, begun)
		}
		free, err = 80, nil
		first := time.Now()
		want := map[string]float64{
			"csi_node_two_words_free_bytes": 80, "csi_node_two_words_volumes thick": 1, "csi_node_two_words_volumes thin": 2,
			"csi_node_two_words_seen_timestamp_seconds": float64(first.Unix()),
		}
		mustShow := func() {
			t.Helper()
			got := scrape(t, p)
			for name, value := range want {
				if got[name] != value {
					t.Errorf("%s is %v, not %v", name, got[name], value)
				}
			}
			if len(got) != len(want) {
				t.Errorf("shows %v", got)
			}
		}
		mustShow()
		time.Sleep(time.Minute)
		free, err = 0, errors.New("the pool is away")
		mustShow() // what was seen last
		free, err = 1, errors.New("a part of it is away")
		want["csi_node_two_words_free_bytes"] = 1
		mustShow() // what can be seen, and when all of it was
		free, err = 2, nil
		want["csi_node_two_words_free_bytes"], want["csi_node_two_words_seen_timestamp_seconds"] = 2, float64(time.Now().Unix())
		mustShow()
	})
}

// Scrapes of a backend that hangs are answered in time, and at most one measurement
// hangs.
func TestMetricsOfAHungBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung chan struct{}
		var counts atomic.Int64
		p := newBackendUse("pool", func() ([]devices.Measurement, error) {
			counts.Add(1)
			if hung != nil {
				<-hung
			}
			return []devices.Measurement{{Name: "free_bytes", Help: "Free.", Value: float64(counts.Load())}}, nil
		})
		if got := scrape(t, p)["csi_node_pool_free_bytes"]; got != 1 {
			t.Fatalf("free are %v", got)
		}
		hung = make(chan struct{})
		begin := time.Now()
		for range 10 {
			if got := scrape(t, p)["csi_node_pool_free_bytes"]; got != 1 {
				t.Errorf("free are %v", got)
			}
		}
		if took := time.Since(begin); took != 10*measureWait || counts.Load() != 2 {
			t.Errorf("10 scrapes took %s, and %d counts", took, counts.Load())
		}
		close(hung)
		synctest.Wait()
		if got := scrape(t, p)["csi_node_pool_free_bytes"]; got != 3 {
			t.Errorf("once it answers again, free are %v", got)
		}
	})
}

// A report has what the backends measure, and does not wait for one that hangs.
func TestPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung chan struct{}
		m := newMetrics("v1")
		m.addBackend("pool", func() ([]devices.Measurement, error) {
			if hung != nil {
				<-hung
			}
			return []devices.Measurement{{Name: "free_bytes", Help: "Free.", Labels: map[string]string{"group": "vg"}, Value: 5}}, nil
		})
		m.addBackend("away", func() ([]devices.Measurement, error) { return nil, errors.New("it never was there") })
		want := []report.Place{{Backend: "pool", Seen: time.Now(), Values: []report.Value{{Name: "free_bytes", Help: "Free.", Labels: map[string]string{"group": "vg"}, Value: 5}}}}
		if got := m.places(); !reflect.DeepEqual(got, want) {
			t.Errorf("measured is %+v", got)
		}
		time.Sleep(time.Hour)
		hung = make(chan struct{})
		begin := time.Now()
		if got := m.places(); !reflect.DeepEqual(got, want) || time.Since(begin) != placesWait {
			t.Errorf("while it hangs, after %s: %+v", time.Since(begin), got)
		}
		close(hung)
	})
}
