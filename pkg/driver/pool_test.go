package driver

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/csi-node/csi-node/pkg/devices/pool"
)

// scrape returns the values of a pool's metrics, by name and label.
func scrape(t *testing.T, p *poolUse) map[string]float64 {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	registry.MustRegister(p)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
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

func TestPoolMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c, err := pool.Capacity{Total: 100, Free: 80, Available: 10, Allocated: 15, Promised: 70, Owed: 90, Thick: 1, Thin: 2, Damaged: 3}, errors.New("no pool yet")
		p := newPoolUse(func() (pool.Capacity, error) { return c, err })
		if got := scrape(t, p); len(got) != 0 {
			t.Errorf("before it was ever counted: %v", got)
		}
		err = nil
		first := time.Now()
		want := map[string]float64{
			"csi_node_pool_size_bytes": 100, "csi_node_pool_free_bytes": 80, "csi_node_pool_available_bytes": 10, "csi_node_pool_allocated_bytes": 15,
			"csi_node_pool_promised_bytes": 70, "csi_node_pool_owed_bytes": 90,
			"csi_node_pool_volumes thick": 1, "csi_node_pool_volumes thin": 2, "csi_node_pool_volumes unknown": 3,
			"csi_node_pool_seen_timestamp_seconds": float64(first.Unix()),
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
		c.Free, err = 1, errors.New("the pool is away")
		mustShow() // what was seen last
		c.Free, err = 2, nil
		want["csi_node_pool_free_bytes"], want["csi_node_pool_seen_timestamp_seconds"] = 2, float64(time.Now().Unix())
		mustShow()
	})
}

// TestPoolMetricsOfAHungPool: scrapes answer in time, and one count hangs at most.
func TestPoolMetricsOfAHungPool(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hung chan struct{}
		var counts atomic.Int64
		p := newPoolUse(func() (pool.Capacity, error) {
			counts.Add(1)
			if hung != nil {
				<-hung
			}
			return pool.Capacity{Free: counts.Load()}, nil
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
		if took := time.Since(begin); took != 10*poolWait || counts.Load() != 2 {
			t.Errorf("10 scrapes took %s, and %d counts", took, counts.Load())
		}
		close(hung)
		synctest.Wait()
		if got := scrape(t, p)["csi_node_pool_free_bytes"]; got != 3 {
			t.Errorf("once it answers again, free are %v", got)
		}
	})
}
