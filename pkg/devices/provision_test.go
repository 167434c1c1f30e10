package devices

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

func TestChooseASize(t *testing.T) {
	const gib = 1 << 30
	for name, row := range map[string]struct {
		r    SizeRange
		unit int64
		want int64 // 0: OutOfRange
	}{
		"nothing is asked":      {SizeRange{}, 4096, gib},
		"as asked":              {SizeRange{Required: 8192, Smallest: 4096}, 4096, 8192},
		"rounded up":            {SizeRange{Required: 8193}, 4096, 12288},
		"a larger unit":         {SizeRange{Required: 1}, 4 << 20, 4 << 20},
		"no power of two":       {SizeRange{Required: 1001}, 1000, 2000},
		"the smallest":          {SizeRange{Required: 1, Smallest: 300 << 20}, 4096, 300 << 20},
		"the smallest, rounded": {SizeRange{Required: 1, Smallest: 5000}, 4096, 8192},
		"a limit alone":         {SizeRange{Limit: 10000, Smallest: 4096}, 4096, 8192},
		"a large limit alone":   {SizeRange{Limit: 2 * gib}, 4096, gib},
		"exactly":               {SizeRange{Required: 8192, Limit: 8192}, 4096, 8192},
		"none between":          {SizeRange{Required: 8193, Limit: 8194}, 4096, 0},
		"limit below the unit":  {SizeRange{Limit: 8192}, 4 << 20, 0},
		"smallest, none within": {SizeRange{Limit: 8200, Smallest: 8193}, 4096, 0},
		"the largest":           {SizeRange{Required: LargestBytes}, 4 << 20, LargestBytes},
	} {
		got, err := row.r.Choose(row.unit)
		if got != row.want || (err != nil) != (row.want == 0) || err != nil && state.ClassOf(err) != state.OutOfRange {
			t.Errorf("%s: %d (%v), not %d", name, got, err, row.want)
		}
	}
}

func TestVolumeID(t *testing.T) {
	seen := map[string]string{}
	for name, fit := range map[string]bool{
		"pvc-1": true, "0": true, "a.b_c-d": true, strings.Repeat("n", 124): true, "vol-" + strings.Repeat("0", 31): true,
		"": false, "PVC-1": false, "pvc-1 ": false, "a/b": false, "..": false, "a..b": false, "-a": false, "a\n": false, "ü": false,
		strings.Repeat("n", 125): false, "vol-" + strings.Repeat("0", 32): false,
	} {
		id := VolumeID("lvm-", name)
		if (id == "lvm-"+name) != fit || !strings.HasPrefix(id, "lvm-") || len(id) > 128 || !fitName.MatchString(id) {
			t.Errorf("%q has the id %q", name, id)
		}
		if other, taken := seen[id]; taken {
			t.Errorf("%q and %q have the id %q", name, other, id)
		}
		seen[id] = name
	}
}

type (
	plain struct{ Backend }
	maker struct {
		Backend
		Provisioner
	}
	inliner struct {
		Backend
		Inliner
	}
)

func TestWhoMakesVolumes(t *testing.T) {
	s := NewSet("b", map[string]Backend{"a": plain{}, "b": inliner{}, "c": maker{}})
	if got := strings.Join(s.Provisioners(), " "); got != "c" || s.Default() != "b" {
		t.Errorf("%q make volumes, %q is the usual one", got, s.Default())
	}
	if p, err := s.Provisioner("c"); err != nil || p == nil {
		t.Errorf("c: %v", err)
	}
	for name, words := range map[string]string{"a": "those that do are: c", "x": "which has a, b, c", "": "which has a, b, c"} {
		if p, err := s.Provisioner(name); p != nil || state.ClassOf(err) != state.InvalidArgument || !strings.Contains(err.Error(), words) {
			t.Errorf("%q: %v", name, err)
		}
	}
	if name, in, err := s.Inliner(); name != "b" || in == nil || err != nil {
		t.Errorf("inline volumes are of %q (%v)", name, err)
	}
	if name, in, err := NewSet("a", map[string]Backend{"a": plain{}, "c": maker{}}).Inliner(); name != "" || in != nil || err != nil {
		t.Errorf("inline volumes are of %q (%v)", name, err)
	}
	if _, in, err := NewSet("a", map[string]Backend{"a": inliner{}, "c": plain{}, "d": inliner{}}).Inliner(); in != nil || err == nil || !strings.Contains(err.Error(), "a and d") {
		t.Errorf("of two backends: %v", err)
	}
}
