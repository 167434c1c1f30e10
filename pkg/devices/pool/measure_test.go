package pool

import (
	"maps"
	"testing"
)

// The names of the metrics are made of these.
func TestMeasurements(t *testing.T) {
	got := map[string]float64{}
	for _, m := range measurements(Capacity{Total: 100, Free: 80, Available: 10, Allocated: 15, Promised: 70, Owed: 90, Thick: 1, Thin: 2, Damaged: 3}) {
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
