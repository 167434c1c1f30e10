package node

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// An overcommitted pool promises what it does not have, and tells so in time:
// the writers that come late fail, and thick volumes keep what they have.
func TestOvercommittedPoolTellsInTime(t *testing.T) {
	t.Parallel()
	p := harness.New(t)
	mountSmallPool(t, p)
	address := harness.FreeAddress(t)
	p.Start(harness.Options{Flags: []string{"--http-endpoint", address}})
	t.Cleanup(p.Kill)
	ctx := t.Context()
	double := map[string]string{"provisioning": "thin", "overcommit": "2"}
	volumeOf := func(name string, bytes int64, parameters map[string]string) (*volume, error) {
		v := harness.NewVolume(t, p, name, blockAs(multiWriter))
		_, err := p.Controller.CreateVolume(ctx, v.CreateRequest(bytes, parameters))
		return v, err
	}
	health := func() string {
		t.Helper()
		resp, err := p.Node.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{})
		must(t, err)
		for _, h := range resp.GetBackendHealth() {
			return h.GetReason() + ": " + h.GetMessage()
		}
		return ""
	}

	thick := createAs(t, p, "thick", 32*mib, blockAs(multiWriter), "thick")
	first, err := volumeOf("first", 60*mib, double)
	must(t, err)
	capacity, err := p.Controller.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: double})
	must(t, err)
	room := capacity.GetMaximumVolumeSize().GetValue()
	_, err = volumeOf("second", room+4*mib, double)
	mustRefuse(t, err, codes.ResourceExhausted)
	_, err = volumeOf("second", room/2+4*mib, map[string]string{"provisioning": "thin"})
	mustRefuse(t, err, codes.ResourceExhausted)
	second, err := volumeOf("second", room, double)
	must(t, err)
	_, err = volumeOf("second", room, map[string]string{"provisioning": "thin", "overcommit": "3"})
	mustRefuse(t, err, codes.AlreadyExists, "overcommit 2, not 3")

	pods := map[*volume]string{}
	for _, v := range []*volume{thick, first, second} {
		must(t, v.Stage(ctx))
		pods[v] = v.Target("pod")
		must(t, v.Publish(ctx, pods[v]))
	}
	must(t, fill(pods[first], 60*mib))
	if says := health(); !strings.Contains(says, "PoolFull") || !strings.Contains(says, "is nearly full") {
		t.Errorf("before the pool is full, its health is %q", says)
	}
	m := harness.Metrics(t, address)
	if free, owed := m["csi_node_pool_free_bytes"], m["csi_node_pool_owed_bytes"]; owed <= free || m["csi_node_pool_volumes"] != 3 || m["csi_node_pool_size_bytes"] != 96*mib {
		t.Errorf("before the pool is full, its metrics are %v free, %v owed, %v volumes, %v in all", free, owed, m["csi_node_pool_volumes"], m["csi_node_pool_size_bytes"])
	}
	if err := fill(pods[second], 60*mib); err == nil {
		t.Error("the pool has taken more than it has")
	}
	must(t, fill(pods[thick], 32*mib))
	p.Restart(harness.Options{})
	must(t, fill(pods[thick], 32*mib))
	unpublishAndDelete(first, pods[first])
	must(t, fill(pods[second], 60*mib))
	unpublishAndDelete(second, pods[second])
	if says := health(); says != "" {
		t.Errorf("with room again, the pool's health is %q", says)
	}
	thick.End(pods[thick])
}

func unpublishAndDelete(v *volume, target string) {
	v.T.Helper()
	must(v.T, v.Down(v.T.Context(), target))
	must(v.T, v.Delete(v.T.Context()))
}

// fill writes that many bytes, not zeros, to a device, and through to its disk.
func fill(path string, bytes int64) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_DSYNC, 0)
	if err != nil {
		return err
	}
	block := slices.Repeat([]byte{0xa5}, mib)
	for range bytes / mib {
		if _, err := f.Write(block); err != nil {
			_ = f.Close() // the first error tells
			return err
		}
	}
	return f.Close()
}

// Volumes of any name are listed, page by page, whatever happens between pages.
func TestListVolumesOfAnyName(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	derived := func(name string) string {
		sum := sha256.Sum256([]byte(name))
		return "vol-" + hex.EncodeToString(sum[:16])
	}
	odd := "../π/\t…"
	names := []string{"pvc-a", "PVC-A", "Pvc-a", odd, derived(odd), derived(derived(odd)), ".", "..", ".hidden", "a..b", " ", strings.Repeat("x", 128), strings.Repeat("X", 128), "volume.json", "å", "Å"}
	ids := map[string]string{}
	for _, name := range names {
		for range 2 { // the second call finds the volume
			resp, err := p.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
				Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: mib}, VolumeCapabilities: []*csi.VolumeCapability{blockAs(multiWriter)},
				Parameters: map[string]string{"provisioning": "thin", "csi.storage.k8s.io/pvc/name": name},
			})
			must(t, err)
			id := resp.GetVolume().GetVolumeId()
			if other, taken := ids[strings.ToLower(id)]; taken && other != name {
				t.Fatalf("%q and %q have the id %s", name, other, id)
			}
			ids[strings.ToLower(id)] = name
		}
	}
	for _, name := range []string{"", "a\x00b", strings.Repeat("x", 129), "a\x1b[2Jb"} {
		_, err := p.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name, VolumeCapabilities: []*csi.VolumeCapability{blockAs(multiWriter)}})
		mustRefuse(t, err, codes.InvalidArgument, "name")
	}
	write(t, filepath.Join(p.PoolDir, "volumes", "pvc-a", "volume.json"), "damaged")

	deleted := map[string]bool{}
	listed := map[string]int64{}
	for token, page := "", 0; page == 0 || token != ""; page++ {
		resp, err := p.Controller.ListVolumes(ctx, &csi.ListVolumesRequest{MaxEntries: 3, StartingToken: token})
		must(t, err)
		token = resp.GetNextToken()
		if n := len(resp.GetEntries()); n > 3 || n < 3 && token != "" {
			t.Errorf("page %d has %d entries", page, n)
		}
		for i, e := range resp.GetEntries() {
			v := e.GetVolume()
			if _, twice := listed[v.GetVolumeId()]; twice || len(v.GetVolumeContext()) > 0 || len(v.GetAccessibleTopology()) != 1 {
				t.Errorf("page %d: %v", page, v)
			}
			listed[v.GetVolumeId()] = v.GetCapacityBytes()
			if i == 2 && v.GetVolumeId() != "pvc-a" { // the one that the token names
				_, err := p.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
				must(t, err)
				deleted[v.GetVolumeId()] = true
			}
		}
		if page == 1 {
			p.Restart(harness.Options{})
		}
	}
	if len(listed) != len(names) || !slices.Equal(slices.Sorted(maps.Keys(listed)), slices.Sorted(maps.Keys(ids))) || listed["pvc-a"] != 0 {
		t.Errorf("listed are %v, created were %v", listed, ids)
	}
	for id := range ids {
		resp, err := p.Controller.ControllerGetVolume(ctx, &csi.ControllerGetVolumeRequest{VolumeId: id})
		switch {
		case deleted[id]:
			mustRefuse(t, err, codes.NotFound, id)
		case id == "pvc-a":
			mustRefuse(t, err, codes.Internal, "volume.json")
		case err != nil || resp.GetVolume().GetCapacityBytes() != mib:
			t.Errorf("volume %s: %v, %v", id, resp, err)
		}
		_, err = p.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
		must(t, err)
	}
	for _, dir := range []string{"volumes", "tmp", "trash"} {
		if left, err := os.ReadDir(filepath.Join(p.PoolDir, dir)); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
}

// The smallest volume that GetCapacity tells of can be had, and no smaller one.
func TestSmallestVolumeOfGetCapacityCanBeHad(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	ctx := t.Context()
	for _, parameters := range []map[string]string{nil, {"provisioning": "thin"}, {"provisioning": "thin", "overcommit": "1.5", "sectorSize": "512"}} {
		for _, c := range []*csi.VolumeCapability{blockAs(multiWriter), mountAs("ext4", multiWriter), mountAs("xfs", multiWriter)} {
			t.Run(fmt.Sprint(parameters, c.GetMount().GetFsType()), func(t *testing.T) {
				all := []*csi.VolumeCapability{c}
				told, err := p.Controller.GetCapacity(ctx, &csi.GetCapacityRequest{Parameters: parameters, VolumeCapabilities: all})
				must(t, err)
				most, least := told.GetMaximumVolumeSize().GetValue(), told.GetMinimumVolumeSize().GetValue()
				if most > told.GetAvailableCapacity() || most < least || least < 4096 {
					t.Fatalf("GetCapacity tells %v", told)
				}
				request := &csi.CreateVolumeRequest{Name: "volume", VolumeCapabilities: all, Parameters: parameters, CapacityRange: &csi.CapacityRange{LimitBytes: least}}
				resp, err := p.Controller.CreateVolume(ctx, request)
				must(t, err)
				if got := resp.GetVolume().GetCapacityBytes(); got != least {
					t.Errorf("the smallest has %d bytes, not %d", got, least)
				}
				_, err = p.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: "volume"})
				must(t, err)
				if least > 4096 {
					request.CapacityRange = &csi.CapacityRange{LimitBytes: least - 1}
					_, err = p.Controller.CreateVolume(ctx, request)
					mustRefuse(t, err, codes.OutOfRange, fmt.Sprint(least))
				}
			})
		}
	}
}
