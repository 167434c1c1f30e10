package pool

import (
	"reflect"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestOvercommitParameter(t *testing.T) {
	for value, want := range map[string]int64{ // 0: refused
		"1": 100, "1.0": 100, "01": 100, "1.5": 150, "1.05": 105, "2.75": 275, "99.99": 9999, "100": 10000, "100.00": 10000,
		"": 0, "0": 0, "0.99": 0, "100.01": 0, "101": 0, "999": 0, "1.": 0, ".5": 0, "1.505": 0, "-1": 0, "+2": 0, " 2": 0, "2 ": 0, "2\n": 0,
		"1e1": 0, "0x2": 0, "inf": 0, "NaN": 0, "1,5": 0, "150%": 0, "1_0": 0, "٢": 0, strings.Repeat("1", 1000): 0,
	} {
		v, err := parse(map[string]string{"provisioning": "thin", "overcommit": value})
		if want == 0 {
			wantError(t, err, state.InvalidArgument, "1 (default) to 100")
		} else if err != nil || v.OvercommitPercent != want {
			t.Errorf("%q is read as %d (%v)", value, v.OvercommitPercent, err)
		}
	}
}

func TestParametersRefused(t *testing.T) {
	for _, test := range []struct {
		key, value, words string
	}{
		{"Provisioning", "thin", "there are overcommit: 1 (default) to 100"},
		{"", "", "provisioning: thick (default) or thin; sectorSize: 512 or 4096"},
		{"provisioning", "", "not thick (default) or thin"},
		{"overcommit", "1.01", "provisioning: thin"},
		{"sectorSize", "1024", "not 512 or 4096"},
		{"sectorSize", "", "not 512 or 4096"},
	} {
		completed, err := Provisioner{}.CheckParameters(map[string]string{test.key: test.value})
		wantError(t, err, state.InvalidArgument, test.words)
		if completed != nil {
			t.Errorf("%q: %q gives %v", test.key, test.value, completed)
		}
	}
}

// TestParametersAreRead as they are told: parametersOf is the inverse of parse.
func TestParametersAreRead(t *testing.T) {
	for _, p := range []struct{ key, value string }{
		{"provisioning", "thin"}, {"provisioning", "thick"}, {"overcommit", "1"}, {"overcommit", "1.05"}, {"overcommit", "1.5"}, {"overcommit", "100"},
		{"sectorSize", "512"}, {"sectorSize", "4096"},
	} {
		var v Volume
		if known, good := set(&v, p.key, p.value); !known || !good || parametersOf(v)[p.key] != p.value {
			t.Errorf("%s: %q is told as %q", p.key, p.value, parametersOf(v)[p.key])
		}
	}
	if v, err := parse(nil); err != nil || !reflect.DeepEqual(v, Volume{Provisioning: Thick, OvercommitPercent: devices.NoOvercommit}) {
		t.Errorf("no parameters: %+v (%v)", v, err)
	}
}

func FuzzParameters(f *testing.F) {
	f.Add("overcommit", "1.5")
	f.Add("sectorSize", "4096")
	f.Add("\x00", "\xff")
	f.Fuzz(func(t *testing.T, key, value string) {
		v, err := parse(map[string]string{"provisioning": "thin", key: value})
		if err == nil && (v.OvercommitPercent < devices.NoOvercommit || v.OvercommitPercent > devices.MaxOvercommit || v.Provisioning != Thin && key != provisioningKey) ||
			err != nil && (state.ClassOf(err) != state.InvalidArgument || len(err.Error()) > 4096) {
			t.Errorf("%q: %q gives %+v, %v", key, value, v, err)
		}
	})
}
