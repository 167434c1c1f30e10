package lvm

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// report is what LVM tells of a group.
type report struct {
	name, uuid string // the UUID is without dashes
	sequence   int64  // of the metadata that it tells of: each change has the next one
	extent     int64  // bytes
	extents    int64
	free       int64 // extents
	missing    int64 // disks that are not there
	volumes    map[string]logical
	pools      map[string]thinPool
	disks      []physical // that are there and may have new extents, the emptiest first
}

// logical is a logical volume.
type logical struct {
	name, uuid string
	bytes      int64
	pool       string // of a thin volume
	active     bool
	automatic  bool // udev activates it when its group appears
	suspended  bool
	origin     bool // snapshots of it need it
	tags       tags
	layout     layout  // of a thick volume
	odd        string  // else what its layout is: one that no class has
	broken     string  // what LVM says of its health; empty: nothing
	unfinished bool    // its creation was cut short, see takeParts and noteUnfinished
	synced     float64 // percent of a mirror that is the same on its disks; 100 while it is not active
}

// thinPool is a thin pool.
type thinPool struct {
	name           string
	bytes          int64
	data, metadata float64 // percent that is used; 0 if asleep
	asleep         bool    // it is not active, so how full it is is not known
	zeroes         bool    // it zeroes what it hands out
	broken         string  // what LVM says of its health; empty: nothing
}

// reportArguments ask for a report. All values come as text.
var reportArguments = []string{
	"fullreport", "--reportformat", "json", "--units", "b", "--nosuffix",
	"--configreport", "vg", "--options", "vg_name,vg_uuid,vg_seqno,vg_extent_size,vg_extent_count,vg_free_count,vg_missing_pv_count",
	"--configreport", "lv", "--options", "lv_name,lv_uuid,lv_size,lv_attr,lv_active,lv_autoactivation,lv_suspended,lv_tags,lv_layout,pool_lv,data_percent,metadata_percent,copy_percent,lv_health_status",
	"--configreport", "pv", "--options", "pv_name,pv_pe_count,pv_pe_alloc_count,pv_allocatable,pv_missing",
	"--configreport", "seg", "--options", "lv_uuid,segtype,stripes,stripe_size",
	"--configreport", "pvseg", "--options", "pvseg_start",
}

// parseReport reads the report of one group.
func parseReport(text []byte) (*report, error) {
	var raw struct {
		Report []struct {
			VG  []map[string]string `json:"vg"`
			LV  []map[string]string `json:"lv"`
			PV  []map[string]string `json:"pv"`
			Seg []map[string]string `json:"seg"`
		} `json:"report"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, fmt.Errorf("the report of lvm: %w", err)
	}
	if len(raw.Report) != 1 || len(raw.Report[0].VG) != 1 {
		return nil, fmt.Errorf("the report of lvm is not of one volume group, but of %d", len(raw.Report))
	}
	p := parser{row: raw.Report[0].VG[0]}
	r := &report{
		name: p.text("vg_name"), uuid: bare(p.text("vg_uuid")), sequence: p.number("vg_seqno"), extent: p.number("vg_extent_size"), extents: p.number("vg_extent_count"),
		free: p.number("vg_free_count"), missing: p.number("vg_missing_pv_count"), volumes: map[string]logical{}, pools: map[string]thinPool{},
	}
	for _, row := range raw.Report[0].LV {
		p.row = row
		r.add(&p)
	}
	r.takeParts()
	byUUID := map[string]string{}
	for name, v := range r.volumes {
		byUUID[v.uuid] = name
	}
	seen := map[string]bool{}
	for _, row := range raw.Report[0].Seg {
		p.row = row
		if name, is := byUUID[bare(p.text("lv_uuid"))]; is {
			r.addSegment(&p, name, seen[name])
			seen[name] = true
		}
	}
	r.noteUnfinished()
	for _, row := range raw.Report[0].PV {
		p.row = row
		if free := p.number("pv_pe_count") - p.number("pv_pe_alloc_count"); p.text("pv_missing") == "" && p.text("pv_allocatable") != "" {
			r.disks = append(r.disks, physical{p.text("pv_name"), free})
		}
	}
	sortDisks(r.disks)
	if p.err == nil && (r.uuid == "" || r.extent <= 0) {
		p.err = fmt.Errorf("volume group %q with the UUID %q and extents of %d bytes", r.name, r.uuid, r.extent)
	}
	if p.err != nil {
		return nil, fmt.Errorf("the report of lvm: %w", p.err)
	}
	return r, nil
}

// add adds a row of the logical volumes.
func (r *report) add(p *parser) {
	name, layout, attributes := p.text("lv_name"), strings.Split(p.text("lv_layout"), ","), p.text("lv_attr")
	if slices.Contains(layout, "thin") && slices.Contains(layout, "pool") {
		r.pools[name] = thinPool{
			name: name, bytes: p.number("lv_size"), data: p.percent("data_percent"), metadata: p.percent("metadata_percent"), asleep: p.text("data_percent") == "",
			zeroes: len(attributes) > 7 && attributes[7] == 'z', broken: p.text("lv_health_status"),
		}
		return
	}
	v := logical{
		name: name, uuid: bare(p.text("lv_uuid")), bytes: p.number("lv_size"), pool: p.text("pool_lv"),
		active: p.text("lv_active") == "active", automatic: p.text("lv_autoactivation") != "", suspended: p.text("lv_suspended") == "suspended", tags: parseTags(p.text("lv_tags")),
		origin: strings.HasPrefix(strings.ToLower(attributes), "o"), broken: p.text("lv_health_status"), synced: 100,
	}
	if p.text("copy_percent") != "" {
		v.synced = p.percent("copy_percent")
	}
	r.volumes[name] = v
}

// partName matches the names that LVM keeps for what a mirror is made of.
var partName = regexp.MustCompile(`^(.+)_r(meta|image)_[0-9]+$`)

// takeParts takes the parts of mirrors out of the report, which bear the tags of their
// volume. LVM shows them while it clears them, and hides them then: if it was cut short,
// they can still be seen. A volume is unfinished only if nobody has had it: the parts of
// others can be seen after a conversion by hand (lvconvert), and they hold data.
func (r *report) takeParts() {
	for name := range r.volumes {
		match := partName.FindStringSubmatch(name)
		if match == nil {
			continue
		}
		delete(r.volumes, name)
		if whole, has := r.volumes[match[1]]; has {
			whole.unfinished = whole.tags.unzeroed
			r.volumes[match[1]] = whole
		}
	}
}

// noteUnfinished notes the mirrors that LVM has laid out, and whose creation was cut short
// before udev was kept from activating them. By then the kernel may have noted the mirror on
// one of its disks only, and would refuse to activate it from then on (dm-raid: EINVAL).
func (r *report) noteUnfinished() {
	for name, v := range r.volumes {
		if v.layout.raid1 && v.tags.unzeroed && v.automatic {
			v.unfinished = true
			r.volumes[name] = v
		}
	}
}

// addSegment adds a segment of a volume, which comes after another one of it or not.
func (r *report) addSegment(p *parser, name string, another bool) {
	v := r.volumes[name]
	l, odd := layoutOf(p.text("segtype"), p.number("stripes"), p.number("stripe_size"))
	switch {
	case !another:
		v.layout, v.odd = l, odd
	case odd == "" && l != v.layout:
		v.odd = "of segments that differ"
	}
	r.volumes[name] = v
}

func bare(uuid string) string { return strings.ReplaceAll(uuid, "-", "") }

// parser reads the values of a row, and keeps the first error.
type parser struct {
	row map[string]string
	err error
}

func (p *parser) text(key string) string {
	value, has := p.row[key]
	if !has && p.err == nil {
		p.err = fmt.Errorf("it lacks %s", key)
	}
	return strings.TrimSpace(value)
}

// number reads a number; an empty text, which stands for what does not apply, is 0.
func (p *parser) number(key string) int64 {
	text := p.text(key)
	if text == "" {
		return 0
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil && p.err == nil {
		p.err = fmt.Errorf("%s: %w", key, err)
	}
	return n
}

func (p *parser) percent(key string) float64 {
	text := p.text(key)
	if text == "" {
		return 0
	}
	n, err := strconv.ParseFloat(text, 64)
	if err != nil && p.err == nil {
		p.err = fmt.Errorf("%s: %w", key, err)
	}
	return n
}

// parseRanges reads the extents of a logical volume as `lvs -o seg_pe_ranges` lists them,
// such as /dev/sdb:3-7.
func parseRanges(text []byte) (ranges []string, err error) {
	rows, err := parseRows(text)
	if err != nil {
		return nil, err
	}
	for _, row := range rows {
		ranges = append(ranges, strings.Fields(row["seg_pe_ranges"])...)
	}
	if len(ranges) == 0 {
		return nil, fmt.Errorf("the report of lvm tells no extents: %.200s", text)
	}
	return ranges, nil
}

// parseRows reads the segments, or else the volumes, that lvs lists.
func parseRows(text []byte) (rows []map[string]string, err error) {
	var raw struct {
		Report []struct {
			Seg []map[string]string `json:"seg"`
			LV  []map[string]string `json:"lv"`
		} `json:"report"`
	}
	if err := json.Unmarshal(text, &raw); err != nil {
		return nil, fmt.Errorf("the report of lvm: %w", err)
	}
	for _, r := range raw.Report {
		rows = append(append(rows, r.Seg...), r.LV...)
	}
	return rows, nil
}
