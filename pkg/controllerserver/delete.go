package controllerserver

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// DeleteVolume deletes a volume and its data. One that does not exist, or
// cannot, is deleted already.
//
// FailedPrecondition: the volume is still in use, at the paths named.
func (s *Server) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id := req.GetVolumeId()
	switch {
	case id == "":
		return nil, state.Errorf(state.InvalidArgument, "volume_id is missing")
	case pool.ValidateID(id) != nil:
		return &csi.DeleteVolumeResponse{}, nil // no volume can have it
	}
	if record := s.Intents.Get(id); record != nil {
		return nil, state.Errorf(state.FailedPrecondition, "volume %s: it is still in use on node %s, at %s: NodeUnpublishVolume and NodeUnstageVolume come first", id, s.NodeID, strings.Join(paths(record), ", "))
	}
	// What is staged from here on finds the volume attached or gone: the
	// backend takes attach and delete one after the other.
	if err := s.Deleter.Delete(ctx, id); err != nil && state.ClassOf(err) != state.NotFound {
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
