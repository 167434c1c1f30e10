package driver

import (
	"bytes"
	"encoding/json"
	"io"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/luks"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/require"
)

// What the backends have is told by a plugin that runs, and without one.
func TestInventory(t *testing.T) {
	c := testConfig(t)
	conn, stop := serving(t, c)
	createVolume(t, c, csi.NewControllerClient(conn), "b")
	createVolume(t, c, csi.NewControllerClient(conn), "a")
	stage := &csi.NodeStageVolumeRequest{VolumeId: "b", StagingTargetPath: c.KubeletDir + "/stage", VolumeCapability: rawCapability()}
	_, err := csi.NewNodeClient(conn).NodeStageVolume(t.Context(), stage)
	require.NoError(t, err)
	check := func(all inventory, err error) {
		t.Helper()
		if err != nil || all.Driver != c.DriverName || all.Default != "pool" || all.Topology["topology."+c.DriverName+"/node"] == "" || len(all.Volumes) != 2 {
			t.Fatalf("the inventory is %+v (%v)", all, err)
		}
		a, b := all.Volumes[0], all.Volumes[1]
		if a.ID != "a" || a.Is != "" || a.Bytes == 0 || a.Backend != "pool" || a.Parameters["provisioning"] == "" || b.ID != "b" || b.Is != report.Settled {
			t.Errorf("the volumes are %+v", all.Volumes)
		}
	}
	check(readInventory(t.Context(), c.StateDir, Options{}))
	if known := details(t.Context(), c.StateDir, c.DriverName); len(known) != 2 || known["b"].State != "settled" || known["a"].Provisioning == "" {
		t.Errorf("the details are %+v", known)
	}
	if known := details(t.Context(), c.StateDir, "another.driver"); known != nil {
		t.Errorf("of another driver are known %+v", known)
	}
	require.NoError(t, stop())
	check(readInventory(t.Context(), c.StateDir, testOptions()))
	if known := details(t.Context(), c.StateDir, c.DriverName); known != nil {
		t.Errorf("without a plugin are known %+v", known)
	}
	conn, _ = serving(t, c) // takes up what is there, and ends it
	_, err = csi.NewNodeClient(conn).NodeUnstageVolume(t.Context(), &csi.NodeUnstageVolumeRequest{VolumeId: "b", StagingTargetPath: stage.StagingTargetPath})
	require.NoError(t, err)
}

// An encrypted volume has the same size in all lists: that which was asked for.
func TestInventoryOfLayers(t *testing.T) {
	c, o := testConfig(t), testOptions()
	o.Layers = []devices.Layer{luks.New()}
	conn, _ := servingWith(t, c, o)
	made, err := csi.NewControllerClient(conn).CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: "sealed", CapacityRange: &csi.CapacityRange{RequiredBytes: 4 * testVolumeBytes}, Parameters: map[string]string{"encryption": "luks2"},
		VolumeCapabilities: []*csi.VolumeCapability{rawCapability()},
	})
	require.NoError(t, err)
	all, err := readInventory(t.Context(), c.StateDir, o)
	if want := made.GetVolume().GetCapacityBytes(); err != nil || len(all.Volumes) != 1 || all.Volumes[0].Bytes != want || want != 4*testVolumeBytes {
		t.Errorf("a volume of %d bytes is listed as %+v (%v)", want, all.Volumes, err)
	}
}

func exampleInventory() inventory {
	return inventory{Driver: "csi.test", Default: "pool", Topology: map[string]string{"topology.csi.test/node": "n1"}, Volumes: []listedVolume{
		{ID: "blank", Backend: "pool", Bytes: 3 << 29, FSType: "xfs", Layers: []string{"luks"}},
		{ID: "csi-1", Backend: "pool", Bytes: 1 << 20, FSType: "ext4", Inline: true},
		{ID: "formatted", Backend: "pool", Bytes: 1 << 30, FSType: "xfs", Formatted: "xfs"},
		{ID: "lun_7", Backend: "array", Bytes: 5000, Block: true, Context: map[string]string{"lun": "7"}},
	}}
}

// Kubernetes reads what is printed, and knows every field of it.
func TestManifest(t *testing.T) {
	all, err := exampleInventory().manifests(nil, additions{secret: &secretReference{"s", "ns"}})
	require.NoError(t, err)
	var text bytes.Buffer
	require.NoError(t, printManifests(&text, "yaml", all))
	var got []corev1.PersistentVolume
	for d := yaml.NewDecoder(&text); ; {
		var doc any
		if err := d.Decode(&doc); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		raw, err := json.Marshal(doc)
		require.NoError(t, err)
		strict := json.NewDecoder(bytes.NewReader(raw))
		strict.DisallowUnknownFields()
		var pv corev1.PersistentVolume
		require.NoError(t, strict.Decode(&pv))
		got = append(got, pv)
	}
	if len(got) != 3 {
		t.Fatalf("printed are %d volumes", len(got))
	}
	for i, want := range []struct {
		name, handle       string
		bytes              int64
		fsType, attributes string
		mode               corev1.PersistentVolumeMode
	}{
		{"blank", "blank", 3 << 29, "xfs", "", corev1.PersistentVolumeFilesystem},
		{"formatted", "formatted", 1 << 30, "", "", corev1.PersistentVolumeFilesystem},
		{objectName("lun_7"), "lun_7", 5000, "", "array 7", corev1.PersistentVolumeBlock},
	} {
		pv := got[i]
		storage := pv.Spec.Capacity[corev1.ResourceStorage]
		source := pv.Spec.CSI
		attributes := strings.TrimSpace(source.VolumeAttributes["backend"] + " " + source.VolumeAttributes["lun"])
		if pv.Name != want.name || source.VolumeHandle != want.handle || storage.Value() != want.bytes || source.FSType != want.fsType || attributes != want.attributes || *pv.Spec.VolumeMode != want.mode {
			t.Errorf("printed is %+v, not %+v", pv, want)
		}
		if pv.APIVersion != "v1" || pv.Kind != "PersistentVolume" || source.Driver != "csi.test" || pv.Spec.PersistentVolumeReclaimPolicy != corev1.PersistentVolumeReclaimRetain || !slices.Equal(pv.Spec.AccessModes, []corev1.PersistentVolumeAccessMode{corev1.ReadWriteOnce}) {
			t.Errorf("printed is %+v", pv)
		}
		for _, ref := range []*corev1.SecretReference{source.NodeStageSecretRef, source.NodePublishSecretRef, source.NodeExpandSecretRef} {
			if encrypted := want.handle == "blank"; encrypted != (ref != nil) || encrypted && *ref != (corev1.SecretReference{Name: "s", Namespace: "ns"}) {
				t.Errorf("the secrets of %s are %+v", want.handle, source)
			}
		}
		terms := pv.Spec.NodeAffinity.Required.NodeSelectorTerms
		if len(terms) != 1 || len(terms[0].MatchExpressions) != 1 || terms[0].MatchExpressions[0].Key != "topology.csi.test/node" || terms[0].MatchExpressions[0].Operator != corev1.NodeSelectorOpIn || terms[0].MatchExpressions[0].Values[0] != "n1" {
			t.Errorf("the affinity is %+v", terms)
		}
	}
}

func TestManifestOfSome(t *testing.T) {
	all, err := exampleInventory().manifests([]string{"blank"}, additions{class: "local"})
	if err != nil || len(all) != 1 || all[0].Spec.StorageClassName != "local" {
		t.Errorf("printed are %+v (%v)", all, err)
	}
	if locked := exampleInventory().withLayers(all); !slices.Equal(locked, []string{"blank"}) {
		t.Errorf("those that need a secret are %v", locked)
	}
	for secret, want := range map[string]*secretReference{"": nil, "ns/s": {"s", "ns"}} {
		if add := (additions{}); add.name(secret) != nil || !reflect.DeepEqual(add.secret, want) {
			t.Errorf("%q names %+v", secret, add.secret)
		}
	}
	for _, secret := range []string{"s", "/s", "ns/", "ns/s/x", "Ns/s"} {
		if err := new(additions).name(secret); err == nil || !strings.Contains(err.Error(), "--secret-ref") {
			t.Errorf("%q: %v", secret, err)
		}
	}
	broken := exampleInventory()
	broken.Volumes[0].Error = "damaged"
	if all, err := broken.manifests(nil, additions{}); err == nil || len(all) != 2 || all[0].Spec.CSI.VolumeHandle == broken.Volumes[0].ID {
		t.Errorf("beside a damaged one: %+v (%v)", all, err)
	}
	everywhere := exampleInventory()
	everywhere.Topology = nil
	if all, err := everywhere.manifests([]string{"blank"}, additions{}); err != nil || all[0].Spec.NodeAffinity != nil {
		t.Errorf("of a driver that is everywhere: %+v (%v)", all, err)
	}
	for title, test := range map[string]struct {
		of    inventory
		ids   []string
		words string
	}{
		"unknown": {exampleInventory(), []string{"stranger"}, "no backend of this plugin has such a volume"},
		"inline":  {exampleInventory(), []string{"csi-1"}, "ends with its pod"},
		"damaged": {broken, nil, "damaged"},
	} {
		if _, err := test.of.manifests(test.ids, additions{}); err == nil || !strings.Contains(err.Error(), test.words) {
			t.Errorf("%s: %v", title, err)
		}
	}
	var text strings.Builder
	if err := printManifests(&text, "yaml", nil); err != nil || !strings.HasPrefix(text.String(), "# ") {
		t.Errorf("of nothing is printed %q (%v)", text.String(), err)
	}
	text.Reset()
	if err := printManifests(&text, "json", all); err != nil || !strings.Contains(text.String(), `"kind": "List"`) {
		t.Errorf("as JSON is printed %q (%v)", text.String(), err)
	}
}

func TestObjectName(t *testing.T) {
	for _, id := range []string{"pvc-1", "a.b"} {
		if name := objectName(id); name != id {
			t.Errorf("%s is named %s", id, name)
		}
	}
	seen := map[string]bool{}
	for _, id := range []string{"A", "a_b", "-a", "a/b", "a..b", "ü", strings.Repeat("a", 254)} {
		if name := objectName(id); !domainName.MatchString(name) || seen[name] {
			t.Errorf("%s is named %s", id, name)
		} else {
			seen[name] = true
		}
	}
}
