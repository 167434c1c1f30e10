package controllerserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// What a page holds at most, so that it stays below gRPC's limit of 4 MiB for a message.
const (
	mostEntries = 5000
	mostBytes   = 3 << 20
)

// ListVolumes returns a page of the volumes of all backends that create volumes.
//
// They are sorted by a hash of their ids, and a token is the hash of the last id on
// the page: it needs no memory, has a fixed length, stays valid when that volume is
// deleted, and a volume that exists all the time is listed exactly once. A volume
// whose facts cannot be read is listed without a capacity, which means that the
// capacity is not known.
//
// Aborted: the token is not one of ListVolumes.
func (s *Server) ListVolumes(ctx context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	if err := s.provisions("ListVolumes"); err != nil {
		return nil, err
	}
	token, most := req.GetStartingToken(), int(req.GetMaxEntries())
	switch {
	case most < 0:
		return nil, state.Errorf(state.InvalidArgument, "max_entries is %d: it must not be negative", most)
	case token != "" && !validToken.MatchString(token):
		return nil, state.Errorf(state.Aborted, "starting_token %.200q is not one that ListVolumes gave: begin again without a token", token)
	case most == 0 || most > mostEntries:
		most = mostEntries
	}
	var places []place
	for _, name := range s.Backends.Provisioners() {
		ids, err := s.Backends.Get(name).(devices.Provisioner).ListVolumes(ctx)
		if err != nil {
			return nil, err
		}
		places = append(places, placesAfter(token, name, ids)...)
	}
	slices.SortFunc(places, func(a, b place) int { return strings.Compare(a.hash, b.hash) })
	resp := &csi.ListVolumesResponse{}
	if len(places) > most {
		places = places[:most]
		resp.NextToken = places[most-1].hash
	}
	bytes := 0
	for i, p := range places {
		v, err := s.Backends.Get(p.backend).(devices.Provisioner).GetVolume(ctx, devices.Volume{ID: p.id, Backend: p.backend})
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case state.ClassOf(err) == state.NotFound:
			continue // it was deleted meanwhile
		case err != nil:
			klog.FromContext(ctx).Error(err, "Listing a volume whose facts cannot be read", "volume", p.id)
			v = devices.Provisioned{ID: p.id}
		}
		entry := &csi.ListVolumesResponse_Entry{Volume: s.describe(p.backend, v)}
		if bytes += proto.Size(entry); bytes > mostBytes && i > 0 {
			resp.NextToken = places[i-1].hash
			break
		}
		resp.Entries = append(resp.Entries, entry)
	}
	return resp, nil
}

// ControllerGetVolume returns the current state of a volume.
//
// NotFound: there is no such volume.
func (s *Server) ControllerGetVolume(ctx context.Context, req *csi.ControllerGetVolumeRequest) (*csi.ControllerGetVolumeResponse, error) {
	if err := s.provisions("ControllerGetVolume"); err != nil {
		return nil, err
	}
	id := req.GetVolumeId()
	if id == "" {
		return nil, state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	name, _, v, err := s.get(ctx, devices.Volume{ID: id})
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{Volume: s.describe(name, v), Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}

// get returns the volume of an id, which may be an invalid one, and its backend.
// NotFound: no backend that creates volumes has it.
func (s *Server) get(ctx context.Context, v devices.Volume) (name string, p devices.Provisioner, have devices.Provisioned, err error) {
	if name, p, err = s.provisionerOf(ctx, v); err != nil {
		return name, p, have, err
	}
	if p != nil {
		v.Backend = name
		have, err = p.GetVolume(ctx, v)
	}
	if p == nil || state.ClassOf(err) == state.InvalidArgument {
		err = state.Errorf(state.NotFound, "volume %.200q: there is no such volume on node %s", v.ID, s.NodeID)
	}
	return name, p, have, err
}

// provisionerOf returns the backend of a volume as a Provisioner. It is nil if the
// backend does not create volumes, or if this plugin lacks it. The error is that of a
// devices.Owner.
func (s *Server) provisionerOf(ctx context.Context, v devices.Volume) (string, devices.Provisioner, error) {
	name, err := s.Backends.Resolve(ctx, v)
	if err != nil {
		return name, nil, err
	}
	p, _ := s.Backends.Get(name).(devices.Provisioner)
	return name, p, nil
}

// describe returns a volume in the terms of CSI. A volume of the default backend does
// not name it.
func (s *Server) describe(backend string, v devices.Provisioned) *csi.Volume {
	volume := &csi.Volume{VolumeId: v.ID, CapacityBytes: max(v.Bytes-s.Backends.Overhead(v.Context), 0), VolumeContext: maps.Clone(v.Context)}
	if backend != s.Backends.Default() {
		if volume.VolumeContext == nil {
			volume.VolumeContext = map[string]string{}
		}
		volume.VolumeContext[devices.BackendKey] = backend
	}
	if len(s.Topology) > 0 {
		volume.AccessibleTopology = []*csi.Topology{{Segments: s.Topology}}
	}
	return volume
}

// place is the position of a volume in the list.
type place struct{ hash, backend, id string }

var validToken = regexp.MustCompile(`^[0-9a-f]{64}$`)

// placesAfter returns the places behind a hash, or all if it is empty.
func placesAfter(hash, backend string, ids []string) []place {
	var places []place
	for _, id := range ids {
		sum := sha256.Sum256([]byte(id))
		if p := (place{hex.EncodeToString(sum[:]), backend, id}); p.hash > hash {
			places = append(places, p)
		}
	}
	return places
}
