package controllerserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// mostEntries is how many volumes a page holds at most, so that it stays below
// the 4 MiB of gRPC's messages.
const mostEntries = 5000

// ListVolumes returns a page of the pool's volumes.
//
// They come in the order of a hash of their ids, and a token is the hash of the
// last id seen: it needs no memory, has a fixed length, stays good when that
// volume is deleted, and a volume that is there all the while is seen once. A
// volume whose facts cannot be read is listed without a capacity, which means
// that it is not known.
//
// Aborted: the token is none of ListVolumes.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	token, most := req.GetStartingToken(), int(req.GetMaxEntries())
	switch {
	case most < 0:
		return nil, state.Errorf(state.InvalidArgument, "max_entries is %d: it must not be negative", most)
	case token != "" && !validToken.MatchString(token):
		return nil, state.Errorf(state.Aborted, "starting_token %.200q is not one that ListVolumes gave: begin again without", token)
	case most == 0 || most > mostEntries:
		most = mostEntries
	}
	ids, err := s.Pool.IDs(ctx)
	if err != nil {
		return nil, err
	}
	places := placesAfter(token, ids)
	resp := &csi.ListVolumesResponse{}
	if len(places) > most {
		places = places[:most]
		resp.NextToken = places[most-1].hash
	}
	for _, p := range places {
		v, err := s.Pool.Get(ctx, p.id)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case state.ClassOf(err) == state.NotFound:
			continue // it was deleted meanwhile
		case err != nil:
			klog.FromContext(ctx).Error(err, "Listing a volume whose facts cannot be read", "volume", p.id)
			v = pool.Volume{ID: p.id}
		}
		resp.Entries = append(resp.Entries, &csi.ListVolumesResponse_Entry{Volume: s.describe(v)})
	}
	return resp, nil
}

// ControllerGetVolume returns a volume as it is now.
//
// NotFound: there is no such volume.
func (s *Server) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	id := req.GetVolumeId()
	if id == "" {
		return nil, state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	v, err := s.get(ctx, id)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{Volume: s.describe(v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}

// get returns the volume of an id, be it fit for one or not.
func (s *Server) get(ctx context.Context, id string) (pool.Volume, error) {
	if pool.ValidateID(id) != nil {
		return pool.Volume{}, state.Errorf(state.NotFound, "volume %.200q: there is no such volume on node %s", id, s.NodeID)
	}
	return s.Pool.Get(ctx, id)
}

// describe tells the CO of a volume.
func (s *Server) describe(v pool.Volume) *csi.Volume {
	return &csi.Volume{
		VolumeId:           v.ID,
		CapacityBytes:      v.Bytes,
		AccessibleTopology: []*csi.Topology{{Segments: map[string]string{s.TopologyKey: s.NodeID}}},
	}
}

// place is where a volume stands in the list.
type place struct{ hash, id string }

var validToken = regexp.MustCompile(`^[0-9a-f]{64}$`)

// placesAfter returns the places behind a hash, or all, in order.
func placesAfter(hash string, ids []string) []place {
	var places []place
	for _, id := range ids {
		sum := sha256.Sum256([]byte(id))
		if p := (place{hex.EncodeToString(sum[:]), id}); p.hash > hash {
			places = append(places, p)
		}
	}
	slices.SortFunc(places, func(a, b place) int { return strings.Compare(a.hash, b.hash) })
	return places
}
