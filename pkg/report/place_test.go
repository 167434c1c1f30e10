package report

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

func TestFills(t *testing.T) { synctest.Test(t, testFills) }

func testFills(t *testing.T) {
	value := func(name string, v float64, labels ...string) Value {
		all := map[string]string{}
		for i, label := range labels {
			all[[]string{"group", "thin_pool"}[i]] = label
		}
		return Value{Name: name, Labels: all, Value: v}
	}
	for name, c := range map[string]struct {
		place Place
		want  []Fill
	}{
		"pool": {Place{Backend: "pool", Values: []Value{value("size_bytes", 100*gib), value("free_bytes", 58*gib), value("available_bytes", 53*gib), value("volumes", 3, "thick")}},
			[]Fill{{"pool", 0.42, "58Gi of 100Gi free, 53Gi for new volumes"}}},
		"groups": {Place{Backend: "lvm", Values: []Value{
			value("size_bytes", 10*gib, "vg0"), value("free_bytes", 10*gib, "vg0"),
			value("thin_pool_size_bytes", 4*gib, "vg0", "thin"), value("thin_pool_data_used_ratio", 0.25, "vg0", "thin"), value("thin_pool_available_bytes", 2*gib, "vg0", "thin"),
			value("size_bytes", 8*gib, "vg1"), value("free_bytes", 2*gib, "vg1"),
		}}, []Fill{{"lvm vg0", 0, "10Gi of 10Gi free"}, {"lvm vg0 thin", 0.25, "3Gi of 4Gi free, 2Gi for new volumes"}, {"lvm vg1", 0.75, "2Gi of 8Gi free"}}},
		"just measured": {Place{Backend: "pool", Seen: time.Now(), Values: []Value{value("size_bytes", 4*gib), value("free_bytes", gib)}}, []Fill{{"pool", 0.75, "1Gi of 4Gi free"}}},
		"away": {Place{Backend: "pool", Seen: time.Now().Add(-90 * time.Second), Values: []Value{value("size_bytes", 4*gib), value("free_bytes", gib)}},
			[]Fill{{"pool", 0.75, "1Gi of 4Gi free when last measured, 1m30s ago"}}},
		"nothing known": {Place{Backend: "acme", Values: []Value{value("luns", 3)}}, nil},
		"no size":       {Place{Backend: "pool", Values: []Value{value("size_bytes", 0), value("free_bytes", 0)}}, nil},
	} {
		if got := c.place.Fills(); !slices.Equal(got, c.want) {
			t.Errorf("%s: %+v, not %+v", name, got, c.want)
		}
	}
}
