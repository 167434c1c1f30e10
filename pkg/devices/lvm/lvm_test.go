package lvm

import (
	"maps"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

func parsed(t *testing.T, groups string) *Backend {
	t.Helper()
	b, err := New(groups, devices.Environment{DriverName: "d"})
	require.NoError(t, err)
	return b
}

func TestGroups(t *testing.T) {
	if b := parsed(t, "vg0,vg-1"); strings.Join(b.names, " ") != "vg0 vg-1" {
		t.Errorf("%q", b.names)
	}
	for _, bad := range []string{"vg0,vg0", "a/b", "-a", "a\nb", ",", " "} {
		if _, err := New(bad, devices.Environment{}); err == nil {
			t.Errorf("%q are no groups", bad)
		}
	}
}

const group = "AAAAAABBBBCCCCDDDDEEEEFFFFGGGGGG"

func TestIDs(t *testing.T) {
	for name, c := range map[string]struct {
		id       string
		own, bad bool
	}{
		"own":             {"lvm-" + group + "-pvc-1", true, false},
		"of the pool":     {"pvc-1", false, false},
		"a short UUID":    {"lvm-AAAA-pvc-1", false, false},
		"no name":         {"lvm-" + group + "-", false, false},
		"no id":           {"", false, true},
		"a path":          {"lvm-" + group + "-../x", false, true},
		"two dots":        {"lvm-" + group + "-a..b", false, true},
		"far too long":    {"lvm-" + group + "-" + strings.Repeat("x", 100), false, true},
		"a line of a tag": {"lvm-" + group + "-a\nb", false, true},
	} {
		t.Run(name, func(t *testing.T) {
			b := parsed(t, "vg0")
			if owns, err := b.Owns(t.Context(), c.id); owns != c.own || err != nil {
				t.Errorf("it owns it: %t (%v)", owns, err)
			}
			if err := b.Validate(devices.Volume{ID: c.id}); c.bad {
				require.Class(t, err, state.InvalidArgument)
			} else {
				require.NoError(t, err)
			}
		})
	}
	if id, own, err := parseID(volumeID{group, "pvc-1"}.String()); !own || err != nil || id != (volumeID{group, "pvc-1"}) {
		t.Errorf("%+v %t %v", id, own, err)
	}
}

func TestLogicalNames(t *testing.T) {
	seen := map[string]string{}
	for _, name := range []string{"pvc-1", "PVC-1", "pvc_tmeta", "snapshot1", "pvmove0", "a/b", "Übung", strings.Repeat("a-", 40), strings.Repeat("x", 64), strings.Repeat("x", 63)} {
		lv := logicalName(name)
		if other, taken := seen[lv]; taken {
			t.Errorf("%q and %q are both %q", name, other, lv)
		}
		seen[lv] = name
		if len(escape(lv)) > longestName || reservedName.MatchString(lv) || strings.HasPrefix(lv, growthPrefix) {
			t.Errorf("%q is %q", name, lv)
		}
		if id := (volumeID{group, lv}); len(id.String()) > 128 {
			t.Errorf("%q is too long", id)
		}
	}
	if logicalName("pvc-1") != "pvc-1" {
		t.Error("a name that is fit is changed")
	}
	for _, c := range [][2]string{{"vg0", "pvc-1"}, {"vg-0", "a"}, {"a", "b--c"}} {
		if g, lv, ok := splitDeviceName(deviceName(c[0], c[1])); !ok || g != c[0] || lv != c[1] {
			t.Errorf("%q is %q and %q", c, g, lv)
		}
	}
	if _, _, ok := splitDeviceName("vg0-thin-tpool"); ok {
		t.Error("a hidden volume is taken for one")
	}
}

func TestParameters(t *testing.T) {
	type parameters = map[string]string
	for name, c := range map[string]struct {
		groups  string
		ask     parameters
		want    parameters
		refused string // a word of the refusal
	}{
		"the only group":     {"vg0", nil, parameters{"volumeGroup": "vg0", "provisioning": "thick", "overcommit": "1"}, ""},
		"thick":              {"vg0,vg1", parameters{"volumeGroup": "vg1", "provisioning": "thick"}, parameters{"volumeGroup": "vg1", "provisioning": "thick", "overcommit": "1"}, ""},
		"thin by its pool":   {"vg0", parameters{"thinPool": "p"}, parameters{"volumeGroup": "vg0", "thinPool": "p", "provisioning": "thin", "overcommit": "1"}, ""},
		"overcommitted":      {"vg0", parameters{"thinPool": "p", "overcommit": "2.50"}, parameters{"volumeGroup": "vg0", "thinPool": "p", "provisioning": "thin", "overcommit": "2.5"}, ""},
		"which group":        {"vg0,vg1", nil, nil, "vg0, vg1"},
		"no group":           {"", nil, nil, "volumeGroup"},
		"another group":      {"vg0", parameters{"volumeGroup": "vg1"}, nil, "vg1"},
		"unknown":            {"vg0", parameters{"stripe": "2"}, nil, "thinPool: "},
		"thin without pool":  {"vg0", parameters{"provisioning": "thin"}, nil, "thinPool"},
		"thick with a pool":  {"vg0", parameters{"provisioning": "thick", "thinPool": "p"}, nil, "thin"},
		"a path":             {"vg0", parameters{"thinPool": "../p"}, nil, "thinPool"},
		"thick, overcommit":  {"vg0", parameters{"overcommit": "2"}, nil, "thinPool"},
		"striped":            {"vg0", parameters{"stripes": "3"}, parameters{"volumeGroup": "vg0", "provisioning": "thick", "overcommit": "1", "stripes": "3", "stripeSize": "64Ki"}, ""},
		"stripes of a size":  {"vg0", parameters{"stripes": "2", "stripeSize": "1024Ki"}, parameters{"volumeGroup": "vg0", "provisioning": "thick", "overcommit": "1", "stripes": "2", "stripeSize": "1Mi"}, ""},
		"one stripe":         {"vg0", parameters{"stripes": "1"}, parameters{"volumeGroup": "vg0", "provisioning": "thick", "overcommit": "1"}, ""},
		"mirrored":           {"vg0", parameters{"raid": "raid1"}, parameters{"volumeGroup": "vg0", "provisioning": "thick", "overcommit": "1", "raid": "raid1"}, ""},
		"no stripe":          {"vg0", parameters{"stripes": "0"}, nil, "stripes"},
		"many stripes":       {"vg0", parameters{"stripes": "129"}, nil, "128"},
		"some stripes":       {"vg0", parameters{"stripes": "+2"}, nil, "stripes"},
		"an odd stripe size": {"vg0", parameters{"stripes": "2", "stripeSize": "48Ki"}, nil, "power of two"},
		"a tiny stripe":      {"vg0", parameters{"stripes": "2", "stripeSize": "2Ki"}, nil, "4Ki"},
		"a huge stripe":      {"vg0", parameters{"stripes": "2", "stripeSize": "1024Mi"}, nil, "512Mi"},
		"stripe size alone":  {"vg0", parameters{"stripeSize": "64Ki"}, nil, "stripes"},
		"another raid":       {"vg0", parameters{"raid": "raid5"}, nil, "raid1"},
		"striped mirrors":    {"vg0", parameters{"raid": "raid1", "stripes": "2"}, nil, "not striped"},
		"thin and striped":   {"vg0", parameters{"thinPool": "p", "stripes": "2"}, nil, "as its thin pool does"},
		"thin and mirrored":  {"vg0", parameters{"thinPool": "p", "raid": "raid1"}, nil, "as its thin pool does"},
		"overcommit by less": {"vg0", parameters{"thinPool": "p", "overcommit": "0.5"}, nil, "0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			b := parsed(t, c.groups)
			got, err := b.CheckParameters(c.ask)
			if c.refused != "" {
				require.Class(t, err, state.InvalidArgument, c.refused)
				return
			}
			if err != nil || !maps.Equal(got, c.want) {
				t.Errorf("%v (%v), want %v", got, err, c.want)
			}
		})
	}
}

// lvm sees the disks of the group, and no other, and an operator's lvm.conf does not change
// its reports.
func TestConfig(t *testing.T) {
	text := config([]string{"/dev/sdb", "/dev/disk.1"})
	for _, word := range []string{`global_filter=["a|^/dev/sdb$|","a|^/dev/disk\\.1$|","r|.*|"]`, "udev_sync=0", "obtain_device_list_from_udev=0", `list_item_separator=","`, "binary_values_as_numeric=0", "compact_output=0"} {
		if !strings.Contains(text, word) {
			t.Errorf("%s lacks %s", text, word)
		}
	}
}
