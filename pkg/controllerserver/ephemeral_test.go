package controllerserver

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

func TestMakeEphemeral(t *testing.T) {
	owner := pool.Owner{PodUID: "uid", Target: "/pods/uid/mount"}
	for name, row := range map[string]struct {
		attributes map[string]string
		fsType     string
		want       pool.Volume
	}{
		"by default": {nil, "", pool.Volume{Bytes: defaultSize, FSType: "ext4", Provisioning: pool.Thick}},
		"as asked": {map[string]string{"size": "1.5Gi", "provisioning": "thin", "sectorSize": "4096", "csi.storage.k8s.io/pod.name": "web"}, "xfs",
			pool.Volume{Bytes: 3 << 29, FSType: "xfs", Provisioning: pool.Thin, SectorBytes: 4096}},
		"too small for the type": {map[string]string{"size": "1"}, "xfs", pool.Volume{Bytes: fakeFilesystems{}.Smallest("xfs"), FSType: "xfs", Provisioning: pool.Thick}},
	} {
		s, _ := newServer()
		got, err := s.MakeEphemeral(t.Context(), "csi-1", row.attributes, row.fsType, owner)
		row.want.OvercommitPercent = pool.NoOvercommit
		if err != nil || got.ID != "csi-1" || got.Ephemeral == nil || *got.Ephemeral != owner || got.Bytes != row.want.Bytes ||
			got.FSType != row.want.FSType || got.Provisioning != row.want.Provisioning || got.SectorBytes != row.want.SectorBytes || got.OvercommitPercent != row.want.OvercommitPercent {
			t.Errorf("%s: made %+v (%v)", name, got, err)
		}
	}
	for _, attributes := range []map[string]string{
		{"size": ""}, {"size": "much"}, {"size": "0"}, {"size": "-1Gi"}, {"size": "1e40"}, {"provisioning": "fat"}, {"colour": "red"}, {"overcommit": "2", "provisioning": "thin"},
	} {
		s, f := newServer()
		_, err := s.MakeEphemeral(t.Context(), "csi-1", attributes, "ext4", owner)
		if state.ClassOf(err) != state.InvalidArgument || len(f.volumes) > 0 {
			t.Errorf("%v: %v, volumes %v", attributes, err, f.volumes)
		}
		if _, unknown := attributes["colour"]; unknown && !strings.Contains(err.Error(), "size: as 500Mi") {
			t.Errorf("%v: %v, which does not name the attributes that there are", attributes, err)
		}
	}
}
