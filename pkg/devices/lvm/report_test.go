package lvm

import (
	"errors"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

const gib = 1 << 30

// reportText is what lvm 2.03.16 prints of a group with a thick and a thin volume.
const reportText = `{
  "report": [
    {
      "vg": [{"vg_name":"vg0", "vg_uuid":"AAAAAA-BBBB-CCCC-DDDD-EEEE-FFFF-GGGGGG", "vg_seqno":"7", "vg_extent_size":"4194304", "vg_extent_count":"1023", "vg_free_count":"500", "vg_missing_pv_count":"0"}],
      "lv": [
        {"lv_name":"thick", "lv_uuid":"aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"8388608", "lv_attr":"-wi-------", "lv_active":"", "lv_autoactivation":"", "lv_suspended":"", "lv_tags":"csi-node.driver=d,csi-node.name=pvc-1,csi-node.unzeroed", "lv_layout":"linear", "pool_lv":"", "data_percent":"", "metadata_percent":"", "copy_percent":"", "lv_health_status":""},
        {"lv_name":"pool", "lv_uuid":"haaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"1073741824", "lv_attr":"twi-aotz--", "lv_active":"active", "lv_autoactivation":"", "lv_suspended":"", "lv_tags":"", "lv_layout":"thin,pool", "pool_lv":"", "data_percent":"25.00", "metadata_percent":"10.94", "copy_percent":"", "lv_health_status":""},
        {"lv_name":"thin", "lv_uuid":"iaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"268435456", "lv_attr":"Vwi-aotz--", "lv_active":"active", "lv_autoactivation":"", "lv_suspended":"suspended", "lv_tags":"csi-node.driver=d,csi-node.name=pvc-2,csi-node.overcommit=200", "lv_layout":"thin,sparse", "pool_lv":"pool", "data_percent":"100.00", "metadata_percent":"", "copy_percent":"", "lv_health_status":""},
        {"lv_name":"wide", "lv_uuid":"jaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"8388608", "lv_attr":"-wi-------", "lv_active":"", "lv_autoactivation":"enabled", "lv_suspended":"", "lv_tags":"", "lv_layout":"striped", "pool_lv":"", "data_percent":"", "metadata_percent":"", "copy_percent":"", "lv_health_status":""},
        {"lv_name":"twice", "lv_uuid":"kaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"8388608", "lv_attr":"Rwi-a-r-r-", "lv_active":"active", "lv_autoactivation":"", "lv_suspended":"", "lv_tags":"", "lv_layout":"raid,raid1", "pool_lv":"", "data_percent":"", "metadata_percent":"", "copy_percent":"50.00", "lv_health_status":"refresh needed"},
        {"lv_name":"odd", "lv_uuid":"laaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "lv_size":"16777216", "lv_attr":"-wi-------", "lv_active":"", "lv_autoactivation":"", "lv_suspended":"", "lv_tags":"", "lv_layout":"linear,striped", "pool_lv":"", "data_percent":"", "metadata_percent":"", "copy_percent":"", "lv_health_status":""}
      ],
      "pv": [
        {"pv_name":"/dev/sdb", "pv_pe_count":"500", "pv_pe_alloc_count":"400", "pv_allocatable":"allocatable", "pv_missing":""},
        {"pv_name":"/dev/sdc", "pv_pe_count":"500", "pv_pe_alloc_count":"100", "pv_allocatable":"allocatable", "pv_missing":""},
        {"pv_name":"/dev/sdd", "pv_pe_count":"500", "pv_pe_alloc_count":"0", "pv_allocatable":"", "pv_missing":""},
        {"pv_name":"[unknown]", "pv_pe_count":"500", "pv_pe_alloc_count":"0", "pv_allocatable":"allocatable", "pv_missing":"missing"}
      ],
      "seg": [
        {"lv_uuid":"aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"linear", "stripes":"1", "stripe_size":"0"},
        {"lv_uuid":"aaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"linear", "stripes":"1", "stripe_size":"0"},
        {"lv_uuid":"haaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"thin-pool", "stripes":"1", "stripe_size":"0"},
        {"lv_uuid":"iaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"thin", "stripes":"0", "stripe_size":"0"},
        {"lv_uuid":"jaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"striped", "stripes":"3", "stripe_size":"65536"},
        {"lv_uuid":"kaaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"raid1", "stripes":"2", "stripe_size":"0"},
        {"lv_uuid":"laaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"linear", "stripes":"1", "stripe_size":"0"},
        {"lv_uuid":"laaaaa-bbbb-cccc-dddd-eeee-ffff-gggggg", "segtype":"striped", "stripes":"2", "stripe_size":"65536"}
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
	thick := logical{name: "thick", uuid: "aaaaaabbbbccccddddeeeeffffgggggg", bytes: 8 << 20, tags: tags{driver: "d", name: "pvc-1", unzeroed: true}, synced: 100}
	thin := logical{name: "thin", uuid: "iaaaaabbbbccccddddeeeeffffgggggg", bytes: 256 << 20, pool: "pool", active: true, suspended: true, tags: tags{driver: "d", name: "pvc-2", overcommit: 200}, synced: 100}
	wide := logical{name: "wide", uuid: "jaaaaabbbbccccddddeeeeffffgggggg", bytes: 8 << 20, automatic: true, layout: layout{stripes: 3, stripe: 64 << 10}, synced: 100}
	twice := logical{name: "twice", uuid: "kaaaaabbbbccccddddeeeeffffgggggg", bytes: 8 << 20, active: true, layout: layout{raid1: true}, broken: "refresh needed", synced: 50}
	odd := logical{name: "odd", uuid: "laaaaabbbbccccddddeeeeffffgggggg", bytes: 16 << 20, odd: "of segments that differ", synced: 100}
	if want := map[string]logical{"thick": thick, "thin": thin, "wide": wide, "twice": twice, "odd": odd}; !reflect.DeepEqual(r.volumes, want) {
		t.Errorf("%+v", r.volumes)
	}
	if pool := (thinPool{name: "pool", bytes: gib, data: 25, metadata: 10.94, zeroes: true}); len(r.pools) != 1 || r.pools["pool"] != pool {
		t.Errorf("%+v", r.pools)
	}
	if want := []physical{{"/dev/sdc", 400}, {"/dev/sdb", 100}}; !slices.Equal(r.disks, want) {
		t.Errorf("%+v", r.disks)
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

// A power cut in lvcreate leaves a mirror whose parts can be seen, and bear its tags.
func TestUnfinishedMirror(t *testing.T) {
	_, row, _ := strings.Cut(reportText, `{"lv_name":"twice"`)
	row, _, _ = strings.Cut(row, "}")
	for tags, unfinished := range map[string]bool{"csi-node.unzeroed": true, "csi-node.formatted=ext4": false, "": false} {
		tagged := strings.Replace(row, `"lv_tags":""`, `"lv_tags":"`+tags+`"`, 1)
		text := strings.Replace(reportText, row, tagged, 1)
		for _, part := range []string{"twice_rmeta_0", "twice_rmeta_1", "other_rimage_0"} {
			text = strings.Replace(text, `{"lv_name":"twice"`, `{"lv_name":"`+part+`"`+tagged+`}, {"lv_name":"twice"`, 1)
		}
		r, err := parseReport([]byte(text))
		require.NoError(t, err)
		if names := slices.Sorted(maps.Keys(r.volumes)); !slices.Equal(names, []string{"odd", "thick", "thin", "twice", "wide"}) {
			t.Errorf("%q", names)
		}
		for name, v := range r.volumes {
			if v.unfinished != (name == "twice" && unfinished) {
				t.Errorf("tagged %q: %s: %t", tags, name, v.unfinished)
			}
		}
	}
	// LVM has hidden the parts, and the first change after lvcreate was not made.
	for automatic, unfinished := range map[string]bool{"enabled": true, "": false} {
		tagged := strings.NewReplacer(`"lv_tags":""`, `"lv_tags":"csi-node.unzeroed"`, `"lv_autoactivation":""`, `"lv_autoactivation":"`+automatic+`"`).Replace(row)
		r, err := parseReport([]byte(strings.Replace(reportText, row, tagged, 1)))
		require.NoError(t, err)
		if r.volumes["twice"].unfinished != unfinished || r.volumes["wide"].unfinished {
			t.Errorf("autoactivation %q: %t", automatic, r.volumes["twice"].unfinished)
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
	r := &report{name: "vg0", extent: 4 << 20, extents: 1000, free: 10, disks: []physical{{"/dev/sdb", 6}, {"/dev/sdc", 4}}, volumes: map[string]logical{}, pools: map[string]thinPool{
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

// What the scheduler is told of a layout is what volumes can have, and no volume has two
// of its legs on one disk.
func TestRoomOfLayouts(t *testing.T) {
	striped, mirrored := layout{stripes: 3, stripe: 64 << 10}, layout{raid1: true}
	for name, c := range map[string]struct {
		free          []int64 // extents of 1 MiB on each disk
		layout        layout
		room, largest int64 // MiB
		on            []string
	}{
		"anywhere":                  {[]int64{6, 3}, layout{}, 9, 9, nil},
		"stripes":                   {[]int64{10, 10, 10}, striped, 30, 30, []string{"a", "b", "c"}},
		"the emptiest disks":        {[]int64{3, 10, 7, 5}, striped, 21, 15, []string{"b", "c", "d"}},
		"more stripes than disks":   {[]int64{10, 10}, striped, 0, 0, nil},
		"a disk that is full":       {[]int64{10, 10, 0}, striped, 0, 0, nil},
		"mirrors":                   {[]int64{10, 10}, mirrored, 9, 9, []string{"a", "b"}},
		"mirrors on three disks":    {[]int64{10, 10, 10}, mirrored, 14, 9, []string{"a", "b"}},
		"no second disk as large":   {[]int64{100, 10, 5}, mirrored, 14, 9, []string{"a", "b"}},
		"mirrors on one disk":       {[]int64{100}, mirrored, 0, 0, nil},
		"only room for their state": {[]int64{100, 1}, mirrored, 0, 0, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := &report{name: "vg0", extent: 1 << 20}
			for i, free := range c.free {
				r.disks = append(r.disks, physical{string(rune('a' + i)), free})
			}
			sortDisks(r.disks)
			class := class{group: "vg0", layout: c.layout}
			room, err := r.room(class)
			if largest := r.largest(c.layout); err != nil || room != c.room<<20 || largest != c.largest<<20 {
				t.Errorf("%d, and %d for one (%v)", room, largest, err)
			}
			if c.largest > 0 {
				require.NoError(t, r.take(class, c.largest<<20))
				if on := r.emptiest(c.layout.legs()); !slices.Equal(on, c.on) {
					t.Errorf("it is put on %q", on)
				}
			}
			require.Class(t, r.take(class, c.largest<<20+1), state.ResourceExhausted, "vg0")
			r.missing = 1
			if room, err := r.room(class); room != 0 || err != nil {
				t.Errorf("without a disk: %d (%v)", room, err)
			}
			require.Class(t, r.take(class, 1), state.ResourceExhausted, "lacks 1")
		})
	}
	r := poolOf(0, 0)
	require.NoError(t, r.takeOn([]string{"/dev/sdb", "/dev/sdc"}, 4))
	require.Class(t, r.takeOn([]string{"/dev/sdb", "/dev/sdc"}, 5), state.ResourceExhausted, "/dev/sdc")
	require.Class(t, r.takeOn([]string{"/dev/sdb", "/dev/sdd"}, 1), state.ResourceExhausted, "/dev/sdd")
}

func TestParseMirror(t *testing.T) {
	row := func(lv, ranges string) string {
		return `{"lv_name":"` + lv + `", "seg_pe_ranges":"` + ranges + `"}`
	}
	first, second := row("[v_rimage_0]", "/dev/sdb:1-5"), row("[v_rimage_1]", "/dev/sdc:1-5")
	others := row("v", "v_rimage_0:0-4 v_rimage_1:0-4") + "," + row("[v_rmeta_0]", "/dev/sdd:0-0") + "," + row("[vv_rimage_0]", "/dev/sde:0-4")
	for name, c := range map[string]struct {
		rows    []string
		refused bool
	}{
		"two":              {[]string{first, others, second}, false},
		"of two segments":  {[]string{first, row("[v_rimage_0]", "/dev/sdb:9-9"), second}, false},
		"one is gone":      {[]string{first, others}, true},
		"on two disks":     {[]string{first, row("[v_rimage_0]", "/dev/sdd:9-9"), second}, true},
		"on the same disk": {[]string{first, row("[v_rimage_1]", "/dev/sdb:6-10")}, true},
		"places changed":   {[]string{first, second, row("[v_rimage_0]", "/dev/sdc:6-6"), row("[v_rimage_1]", "/dev/sdb:6-6")}, true},
	} {
		got, err := parseMirror([]byte(`{"report": [{"seg": [`+strings.Join(c.rows, ",")+`]}]}`), "v")
		if c.refused {
			require.Class(t, err, state.FailedPrecondition, "/dev/sd")
		} else if err != nil || !slices.Equal(got, []string{"/dev/sdb", "/dev/sdc"}) {
			t.Errorf("%s: %q (%v)", name, got, err)
		}
	}
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
	broken.pools["pool"] = thinPool{name: "pool", data: 100, broken: "out_of_data"}
	require.Class(t, broken.health(own), state.ResourceExhausted, "100% full", "lvextend")
	mirror := logical{name: "mirror", layout: layout{raid1: true}, synced: 100, tags: tags{driver: "d"}}
	require.NoError(t, poolOf(0, 0, mirror).health(own))
	degraded := func(missing int64, volumes ...logical) error {
		t.Helper()
		r := poolOf(0, 0, volumes...)
		r.missing = missing
		return r.health(own)
	}
	for _, change := range []func(*logical){
		func(v *logical) { v.broken = "partial" },
		func(v *logical) { v.broken = "refresh needed" },
		func(v *logical) { v.synced = 12 },
	} {
		v := mirror
		change(&v)
		for missing := range int64(2) {
			err := degraded(missing, ours, v)
			if !errors.As(err, new(*state.Degraded)) || !strings.Contains(err.Error(), "vg0/mirror ("+v.flaw()) {
				t.Errorf("%+v: %v", v, err)
			}
		}
		if m := poolOf(0, 0, ours, v).measure(own); !slices.ContainsFunc(m, func(m devices.Measurement) bool { return m.Name == "degraded_volumes" && m.Value == 1 }) {
			t.Errorf("%+v", m)
		}
		others := v
		others.tags.driver = "another"
		require.NoError(t, degraded(0, others))
		gone := ours
		gone.broken = "partial"
		require.Class(t, degraded(1, gone, v), state.Unavailable, "cannot be used")
	}
	if m := poolOf(95, 0, ours).measure(own); !slices.ContainsFunc(m, func(m devices.Measurement) bool {
		return m.Name == "thin_pool_data_used_ratio" && m.Value == 0.95 && m.Labels["thin_pool"] == "pool"
	}) {
		t.Errorf("%+v", m)
	}
	full := &report{name: "vg0"}
	require.Class(t, full.health(own), state.ResourceExhausted, "no room")
}
