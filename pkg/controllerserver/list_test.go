package controllerserver

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// realServer has a pool of its own.
func realServer(t testing.TB) (*Server, *pool.Pool, string) {
	t.Helper()
	dir := t.TempDir() + "/pool"
	p, err := pool.Open(dir)
	require.NoError(t, err)
	return New(Config{NodeID: "node-1", Topology: map[string]string{topologyKey: "node-1"}, Filesystems: fakeFilesystems{}, Backends: backends(p, p.Delete), Intents: fakeIntents{}}), p, dir
}

// pages lists all volumes and returns their ids, page by page. between is
// called after each page.
func pages(t testing.TB, s *Server, most int32, between func()) [][]string {
	t.Helper()
	var all [][]string
	for token := ""; ; between() {
		resp, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: most, StartingToken: token})
		require.NoError(t, err)
		var page []string
		for _, e := range resp.GetEntries() {
			page = append(page, e.GetVolume().GetVolumeId())
		}
		all = append(all, page)
		if token = resp.GetNextToken(); token == "" {
			return all
		}
		if len(token) > 128 {
			t.Errorf("a token of %d bytes", len(token))
		}
	}
}

func TestListVolumes(t *testing.T) {
	s, p := newServer()
	if resp, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{}); err != nil || len(resp.GetEntries()) != 0 || resp.GetNextToken() != "" {
		t.Errorf("an empty pool: %v, %v", resp, err)
	}
	var ids []string
	for i := range 10 {
		id := fmt.Sprintf("v%d", i)
		if i == 0 {
			id = strings.Repeat("x", 128)
		}
		ids = append(ids, id)
		p.volumes[id] = pool.Volume{ID: id, Name: "name of " + id, Bytes: gib, Provisioning: pool.Thin}
	}
	slices.Sort(ids)
	for most, sizes := range map[int32][]int{0: {10}, 1: {1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, 3: {3, 3, 3, 1}, 5: {5, 5}, 9: {9, 1}, 10: {10}, 11: {10}, math.MaxInt32: {10}} {
		var got []int
		all := pages(t, s, most, func() {})
		for _, page := range all {
			got = append(got, len(page))
		}
		if !slices.Equal(got, sizes) {
			t.Errorf("max_entries %d: pages of %v, want %v", most, got, sizes)
		}
		if listed := slices.Concat(all...); !slices.Equal(slices.Sorted(slices.Values(listed)), ids) {
			t.Errorf("max_entries %d lists %q", most, listed)
		}
	}
	resp, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 1})
	require.NoError(t, err)
	v := resp.GetEntries()[0].GetVolume()
	want := &csi.Volume{VolumeId: v.GetVolumeId(), CapacityBytes: gib, AccessibleTopology: []*csi.Topology{topology(topologyKey, "node-1")}}
	if !proto.Equal(v, want) {
		t.Errorf("lists %v, not %v", v, want)
	}
}

func TestListVolumesRefuses(t *testing.T) {
	s, _ := newServer()
	_, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	check(t, err, state.InvalidArgument, "max_entries")
	for _, token := range []string{"invalid-token", "0", "v1", strings.Repeat("g", 64), strings.Repeat("0", 63), strings.Repeat("0", 65), strings.Repeat("A", 64), strings.Repeat("0", 64) + "\n"} {
		_, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token})
		check(t, err, state.Aborted, "starting_token")
	}
}

// A volume that exists all the time is listed once, and no volume twice.
func TestListVolumesWhileTheyComeAndGo(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0))
		s, p := newServer()
		put := func(id string) { p.volumes[id] = pool.Volume{ID: id, Bytes: gib} }
		for i := range 40 {
			put(fmt.Sprintf("stays-%d", i))
			put(fmt.Sprintf("goes-%d", i))
		}
		listed := map[string]int{}
		for _, page := range pages(t, s, 1+r.Int32N(7), func() {
			put(fmt.Sprintf("came-%d", r.Int()))
			for range r.IntN(6) {
				delete(p.volumes, fmt.Sprintf("goes-%d", r.IntN(40)))
			}
		}) {
			for _, id := range page {
				if listed[id]++; listed[id] > 1 {
					t.Errorf("seed %d: %s is listed twice", seed, id)
				}
			}
		}
		for i := range 40 {
			if id := fmt.Sprintf("stays-%d", i); listed[id] != 1 {
				t.Errorf("seed %d: %s is not listed", seed, id)
			}
		}
	}
}

// late is a pool whose volumes cannot be read once they are looked at.
type late struct {
	*fakePool
	class state.Class
}

func (l late) Get(_ context.Context, id string) (pool.Volume, error) {
	return pool.Volume{}, state.Errorf(l.class, "volume %s: not to be read", id)
}

// Who vanishes meanwhile is left out, and whose facts are damaged is listed without them.
func TestListVolumesThatCannotBeRead(t *testing.T) {
	for class, listed := range map[state.Class]int{state.NotFound: 0, state.Internal: 1} {
		s, p := newServer()
		p.volumes["v"] = pool.Volume{ID: "v", Bytes: gib}
		s.Backends = backends(late{p, class}, p.Delete)
		resp, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		if err != nil || len(resp.GetEntries()) != listed || listed > 0 && resp.GetEntries()[0].GetVolume().GetCapacityBytes() != 0 {
			t.Errorf("%s: lists %v (%v)", class, resp, err)
		}
	}
}

// No page is larger than the messages that clients of gRPC accept.
func TestListVolumesInMessages(t *testing.T) {
	s, p := newServer()
	s.Topology = map[string]string{"topology." + strings.Repeat("k", 63) + "/node": strings.Repeat("n", 256)}
	for i := range mostEntries + 1 {
		id := fmt.Sprintf("%0128d", i)
		p.volumes[id] = pool.Volume{ID: id, Bytes: math.MaxInt64}
	}
	resp, err := s.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: math.MaxInt32})
	if err != nil || len(resp.GetEntries()) != mostEntries || resp.GetNextToken() == "" || proto.Size(resp) > 4<<20 {
		t.Errorf("%d entries, %d bytes, next %q (%v)", len(resp.GetEntries()), proto.Size(resp), resp.GetNextToken(), err)
	}
	for i := range 9 {
		s.Topology[fmt.Sprintf("topology.of.a.vendor/level%d", i)] = strings.Repeat("n", 256)
	}
	resp, err = s.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil || proto.Size(resp) > 4<<20 {
		t.Errorf("large entries make %d bytes (%v)", proto.Size(resp), err)
	}
	if all := slices.Concat(pages(t, s, 0, func() {})...); len(all) != mostEntries+1 || len(slices.Compact(slices.Sorted(slices.Values(all)))) != len(all) {
		t.Errorf("of %d volumes, %d are listed", mostEntries+1, len(all))
	}
}

func TestControllerGetVolume(t *testing.T) {
	s, p := newServer()
	p.volumes["v"] = pool.Volume{ID: "v", Bytes: gib}
	resp, err := s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: "v"})
	if err != nil || resp.GetVolume().GetVolumeId() != "v" || resp.GetVolume().GetCapacityBytes() != gib || len(resp.GetVolume().GetAccessibleTopology()) != 1 || resp.GetStatus() == nil {
		t.Errorf("answers %v (%v)", resp, err)
	}
	real, _, _ := realServer(t)
	for id, class := range map[string]state.Class{"": state.InvalidArgument, "w": state.NotFound, "../v": state.NotFound, strings.Repeat("v", 129): state.NotFound} {
		for _, s := range []*Server{s, real} {
			_, err := s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: id})
			check(t, err, class, "volume")
		}
	}
}
