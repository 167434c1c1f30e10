package loop

import (
	"maps"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestRoomLeft(t *testing.T) {
	for title, test := range map[string]struct {
		c    pool.Capacity
		full bool
	}{
		"room":                        {pool.Capacity{Total: 1000, Free: 500, Available: 100, Promised: 400, Owed: 400}, false},
		"all promised":                {pool.Capacity{Total: 1000, Free: 500, Promised: 500, Owed: 500}, true},
		"all allocated":               {pool.Capacity{Total: 1000}, true},
		"nearly all allocated":        {pool.Capacity{Total: 1000, Free: 50, Available: 50}, false},
		"overcommitted":               {pool.Capacity{Total: 1000, Free: 500, Available: 100, Promised: 400, Owed: 4000}, false},
		"overcommitted, nearly full":  {pool.Capacity{Total: 1000, Free: 99, Available: 50, Promised: 49, Owed: 100}, true},
		"overcommitted, yet all fits": {pool.Capacity{Total: 1000, Free: 99, Available: 50, Promised: 49, Owed: 99}, false},
		"promises broken":             {pool.Capacity{Total: 1000, Free: 500, Promised: 501, Owed: 501}, true},
	} {
		if err := roomLeft("/pool", test.c); (err != nil) != test.full || err != nil && state.ClassOf(err) != state.ResourceExhausted {
			t.Errorf("%s: %v", title, err)
		}
	}
}

// The names of the metrics are made of these.
func TestMeasurements(t *testing.T) {
	got := map[string]float64{}
	for _, m := range measurements(pool.Capacity{Total: 100, Free: 80, Available: 10, Allocated: 15, Promised: 70, Owed: 90, Thick: 1, Thin: 2, Damaged: 3}) {
		name := m.Name
		if how := m.Labels["provisioning"]; how != "" {
			name += " " + how
		}
		if got[name] = m.Value; m.Help == "" {
			t.Errorf("nobody says what %s is", name)
		}
	}
	want := map[string]float64{
		"size_bytes": 100, "free_bytes": 80, "available_bytes": 10, "allocated_bytes": 15,
		"promised_bytes": 70, "owed_bytes": 90, "volumes thick": 1, "volumes thin": 2, "volumes unknown": 3,
	}
	if !maps.Equal(got, want) {
		t.Errorf("measures %v, not %v", got, want)
	}
}
