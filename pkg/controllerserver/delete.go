package controllerserver

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// DeleteVolume deletes a volume and its data. One that does not, or cannot, exist is
// deleted already, and so is one of a backend that does not create volumes. So is one of a
// backend that this plugin lacks: the id does not tell it from one that does not exist.
//
// FailedPrecondition: the volume is still in use, at the paths named.
func (s *Server) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if err := s.provisions("DeleteVolume"); err != nil {
		return nil, err
	}
	id := req.GetVolumeId()
	if id == "" {
		return nil, state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	if record := s.Intents.Get(id); record != nil {
		return nil, state.Errorf(state.FailedPrecondition, "volume %s: it is still in use on node %s, at %s: NodeUnpublishVolume and NodeUnstageVolume come first", id, s.NodeID, strings.Join(paths(record), ", "))
	}
	name, p, err := s.provisionerOf(ctx, devices.Volume{ID: id})
	if err != nil {
		return nil, err
	}
	if p == nil {
		return &csi.DeleteVolumeResponse{}, nil
	}
	// A stage from here on finds the volume attached or gone, because the backend
	// runs attach and delete one after the other.
	if err := s.Backends.DeleteVolume(ctx, devices.Volume{ID: id, Backend: name, Secrets: devices.NewSecrets(req.GetSecrets())}); err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// paths returns where a volume is published and staged.
func paths(v *state.Volume) []string {
	list := v.TargetPaths()
	if v.Stage != nil && !slices.Contains(list, v.Stage.Path) {
		list = append(list, v.Stage.Path)
	}
	return list
}
