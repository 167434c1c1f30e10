package pool

import (
	"cmp"
	"context"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// drawn keeps no volume, but what was asked of it.
type drawn struct {
	Volumes
	asked []Volume
}

func (d *drawn) Create(_ context.Context, v Volume) (Volume, error) {
	d.asked = append(d.asked, v)
	return v, nil
}

func ask(id, fsType string, attributes map[string]string) devices.InlineRequest {
	return devices.InlineRequest{ID: id, Owner: devices.InlineOwner{PodUID: "uid", Target: "/pods/uid/mount"}, Attributes: attributes,
		Filesystem: func(bytes int64) (string, int64) {
			fsType := cmp.Or(fsType, "ext4")
			return fsType, map[string]int64{"ext4": 2 << 20, "xfs": 300 << 20}[fsType]
		}}
}

func TestMakeInline(t *testing.T) {
	for name, row := range map[string]struct {
		attributes map[string]string
		fsType     string
		want       Volume
	}{
		"by default":             {nil, "", Volume{Bytes: 1 << 30, FSType: "ext4", Provisioning: Thick}},
		"as asked":               {map[string]string{"size": "1.5Gi", "provisioning": "thin", "sectorSize": "4096"}, "xfs", Volume{Bytes: 3 << 29, FSType: "xfs", Provisioning: Thin, SectorBytes: 4096}},
		"rounded up":             {map[string]string{"size": "5000001"}, "", Volume{Bytes: 5001216, FSType: "ext4", Provisioning: Thick}},
		"with an exponent":       {map[string]string{"size": "+3.5E+6"}, "", Volume{Bytes: 3502080, FSType: "ext4", Provisioning: Thick}},
		"too small for the type": {map[string]string{"size": "1"}, "xfs", Volume{Bytes: 300 << 20, FSType: "xfs", Provisioning: Thick}},
	} {
		d := &drawn{}
		made, err := Provisioner{Volumes: d}.MakeInline(t.Context(), ask("csi-1", row.fsType, row.attributes))
		if err != nil || made != (devices.InlineVolume{FSType: row.want.FSType}) {
			t.Errorf("%s: %+v (%v)", name, made, err)
			continue
		}
		got := d.asked[0]
		if got.Ephemeral == nil || *got.Ephemeral != (Owner{PodUID: "uid", Target: "/pods/uid/mount"}) {
			t.Errorf("%s: made for %+v", name, got.Ephemeral)
		}
		row.want.ID, row.want.OvercommitPercent, got.Ephemeral = "csi-1", devices.NoOvercommit, nil
		if !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s: made %+v, not %+v", name, got, row.want)
		}
	}
	for _, row := range []struct {
		attributes map[string]string
		words      string
	}{
		{map[string]string{"size": ""}, "as 500Mi"}, {map[string]string{"size": "much"}, "as 500Mi"}, {map[string]string{"size": "0"}, "as 500Mi"},
		{map[string]string{"size": "-1Gi"}, "as 500Mi"}, {map[string]string{"size": "1e40"}, "as 500Mi"}, {map[string]string{"provisioning": "fat"}, "thick (default) or thin"},
		// These would take seconds or hours to calculate.
		{map[string]string{"size": "1e-9999999"}, "as 500Mi"}, {map[string]string{"size": "1E9999999"}, "as 500Mi"}, {map[string]string{"size": "1e2000000000"}, "as 500Mi"},
		{map[string]string{"size": strings.Repeat("0", 1<<20)}, "as 500Mi"},
		{map[string]string{"colour": "red"}, "size: such as 500Mi"}, {map[string]string{"overcommit": "2", "provisioning": "thin"}, "cannot overcommit"},
	} {
		d := &drawn{}
		_, err := Provisioner{Volumes: d}.MakeInline(t.Context(), ask("csi-1", "ext4", row.attributes))
		wantError(t, err, state.InvalidArgument, "csi-1", row.words)
		if len(d.asked) > 0 {
			t.Errorf("%v: made %+v", row.attributes, d.asked)
		}
	}
}

// TestListInline: what may be an inline volume is among them.
func TestListInline(t *testing.T) {
	dir := newDir(t)
	p := open(t, dir)
	b := Provisioner{Volumes: p, Delete: p.Delete}
	create(t, p, "claim", 1<<20, Thin)
	create(t, p, "damaged", 1<<20, Thin)
	write(t, dir+"/volumes/damaged/volume.json", "{")
	ids, err := b.ListInline(t.Context())
	if err != nil || !slices.Equal(ids, []string{"damaged"}) {
		t.Errorf("lists %q (%v)", ids, err)
	}
	_, err = b.InlineOwner(t.Context(), "damaged")
	wantError(t, err, state.Internal, "volume.json")
	ok(t, os.Rename(dir, dir+".away"))
	if ids, err := b.ListInline(t.Context()); err == nil {
		t.Errorf("a pool that is away lists %q", ids)
	}
}
