package lvm

import (
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

const gib = 1 << 30

// reportText is what lvm 2.03.16 prints of a group with a thick and a thin volume.
const reportText = `{
  "report": [
    {
      "vg": [{"vg_name":"vg0", "vg_uuid":"AAAAAA-BBBB-CCCC-DDDD-EEEE-FFFF-GGGGGG", "vg_extent_size":"4194304", "vg_extent_count":"1023", "vg_free_count":"500", "vg_missing_pv_count":"0"}],
      "lv": [
        {"lv_name":"thick", "lv_uuid":"aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"8388608", "lv_attr":"-wi-------", "lv_active":"", "lv_suspended":"", "lv_tags":"csi-node.driver=d,csi-node.name=pvc-1,csi-node.unzeroed", "lv_layout":"linear", "pool_lv":"", "data_percent":"", "metadata_percent":"", "lv_health_status":""},
        {"lv_name":"pool", "lv_uuid":"haaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"1073741824", "lv_attr":"twi-aotz--", "lv_active":"active", "lv_suspended":"", "lv_tags":"", "lv_layout":"thin,pool", "pool_lv":"", "data_percent":"25.00", "metadata_percent":"10.94", "lv_health_status":""},
        {"lv_name":"thin", "lv_uuid":"iaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"268435456", "lv_attr":"Vwi-aotz--", "lv_active":"active", "lv_suspended":"suspended", "lv_tags":"csi-node.driver=d,csi-node.name=pvc-2,csi-node.overcommit=200", "lv_layout":"thin,sparse", "pool_lv":"pool", "data_percent":"100.00", "metadata_percent":"", "lv_health_status":""}
      ]
    }
  ]
}`

func TestParseReport(t *testing.T) {
	r, err := parseReport([]byte(reportText))
	require.NoError(t, err)
	if r.name != "vg0" || r.uuid != "AAAAAABBBBCCCCDDDDEEEEFFFFGGGGGG" || r.extent != 4<<20 || r.extents != 1023 || r.free != 500 || r.missing != 0 {
		t.Errorf("%+v", r)
	}
	thick := logical{name: "thick", uuid: "aaaaaabbbbccccddddeeeeffffgggggg", bytes: 8 << 20, tags: tags{driver: "d", name: "pvc-1", unzeroed: true}}
	thin := logical{name: "thin", uuid: "iaaaaabbbbccccddddeeeeffffgggggg", bytes: 256 << 20, pool: "pool", active: true, suspended: true, tags: tags{driver: "d", name: "pvc-2", overcommit: 200}}
	if want := map[string]logical{"thick": thick, "thin": thin}; !reflect.DeepEqual(r.volumes, want) {
		t.Errorf("%+v", r.volumes)
	}
	if pool := (thinPool{name: "pool", bytes: gib, data: 25, metadata: 10.94, zeroes: true}); len(r.pools) != 1 || r.pools["pool"] != pool {
		t.Errorf("%+v", r.pools)
	}
	for name, broken := range map[string]string{
		"nothing":    "",
		"no group":   `{"report": []}`,
		"two groups": `{"report": [{"vg": [{}]}, {"vg": [{}]}]}`,
		"a column":   strings.Replace(reportText, `"lv_tags"`, `"lv_rags"`, 1),
		"a number":   strings.Replace(reportText, `"8388608"`, `"8.00m"`, 1),
		"an extent":  strings.Replace(reportText, `"vg_extent_size":"4194304"`, `"vg_extent_size":"0"`, 1),
	} {
		if _, err := parseReport([]byte(broken)); err == nil {
			t.Errorf("without %s it is taken for a report", name)
		}
	}
}

func TestParseRanges(t *testing.T) {
	text := `{"report": [{"seg": [{"seg_pe_ranges":"/dev/sdb:0-9 /dev/sdc:0-9"}, {"seg_pe_ranges":"/dev/sdb:20-20"}]}]}`
	got, err := parseRanges([]byte(text))
	if want := []string{"/dev/sdb:0-9", "/dev/sdc:0-9", "/dev/sdb:20-20"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q (%v), want %q", got, err, want)
	}
	if _, err := parseRanges([]byte(`{"report": [{"seg": []}]}`)); err == nil {
		t.Error("no extents are no error")
	}
}

// poolOf returns a group with a thin pool that is used so far, and volumes in it.
func poolOf(data, metadata float64, volumes ...logical) *report {
	r := &report{name: "vg0", extent: 4 << 20, extents: 1000, free: 10, volumes: map[string]logical{}, pools: map[string]thinPool{
		"pool": {name: "pool", bytes: gib, data: data, metadata: metadata, zeroes: true},
	}}
	for _, v := range volumes {
		r.volumes[v.name] = v
	}
	return r
}

func TestRoom(t *testing.T) {
	half := logical{name: "half", bytes: gib / 2, pool: "pool", tags: tags{overcommit: 100}}
	twice := logical{name: "twice", bytes: gib, pool: "pool", tags: tags{overcommit: 400}}
	others := logical{name: "others", bytes: gib / 4, pool: "pool"}
	elsewhere := logical{name: "elsewhere", bytes: gib, pool: "other", tags: tags{overcommit: 100}}
	for name, c := range map[string]struct {
		report     *report
		pool       string
		overcommit int64
		room       int64
	}{
		"thick":                      {poolOf(0, 0), "", 100, 40 << 20},
		"an empty pool":              {poolOf(0, 0), "pool", 100, gib},
		"what is claimed":            {poolOf(0, 0, half, elsewhere), "pool", 100, gib / 2},
		"a share":                    {poolOf(0, 0, twice), "pool", 100, gib * 3 / 4},
		"others count in full":       {poolOf(0, 0, others), "pool", 100, gib * 3 / 4},
		"what is written of a share": {poolOf(50, 0, twice), "pool", 100, gib / 2},
		"overcommitted":              {poolOf(0, 0, half), "pool", 300, gib * 3 / 2},
		"nothing is left":            {poolOf(0, 0, half, others, half, logical{name: "more", bytes: gib, pool: "pool"}), "pool", 100, 0},
		"data that is nearly full":   {poolOf(95, 0), "pool", 100, 0},
		"full metadata":              {poolOf(0, 80), "pool", 10000, 0},
	} {
		t.Run(name, func(t *testing.T) {
			class := class{group: "vg0", pool: c.pool, overcommit: c.overcommit}
			room, err := c.report.room(class)
			if err != nil || room != c.room {
				t.Errorf("%d (%v), want %d", room, err, c.room)
			}
			if room > 0 {
				require.NoError(t, c.report.take(class, room))
			}
			require.Class(t, c.report.take(class, room+1), state.ResourceExhausted, "vg0")
		})
	}
	_, err := poolOf(0, 0).room(class{pool: "none", overcommit: 100})
	require.Class(t, err, state.FailedPrecondition, "none")
	leaky := poolOf(0, 0)
	leaky.pools["pool"] = thinPool{name: "pool", bytes: gib}
	_, err = leaky.room(class{pool: "pool", overcommit: 100})
	require.Class(t, err, state.FailedPrecondition, "--zero y")
}

func TestHealth(t *testing.T) {
	own := func(v logical) bool { return v.tags.driver == "d" }
	ours := logical{name: "ours", bytes: gib, pool: "pool", tags: tags{driver: "d"}}
	others := logical{name: "others", bytes: gib, pool: "pool"}
	require.NoError(t, poolOf(94, 79, ours).health(own))
	require.NoError(t, poolOf(99, 99, others).health(own)) // somebody else's
	require.Class(t, poolOf(95, 0, ours).health(own), state.ResourceExhausted, "pool is 95% full")
	require.Class(t, poolOf(0, 80, ours).health(own), state.ResourceExhausted, "metadata")
	lost := poolOf(0, 0, ours)
	lost.missing = 1
	require.Class(t, lost.health(own), state.Unavailable, "lacks 1")
	broken := poolOf(0, 0, ours)
	broken.pools["pool"] = thinPool{name: "pool", broken: "metadata_read_only"}
	require.Class(t, broken.health(own), state.ResourceExhausted, "metadata_read_only")
	full := &report{name: "vg0"}
	require.Class(t, full.health(own), state.ResourceExhausted, "no room")
}
