package nodeserver

import (
	"context"
	"errors"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
)

// NodeStageVolume asks for the volume's device and, for mount access, its file
// system at the staging path. What an empty fs_type means is left to the worker, which
// sees what is on the volume.
func (s *Server) NodeStageVolume(ctx context.Context, req *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	req, err := spell(ctx, s.Paths, req)
	if err != nil {
		return nil, err
	}
	stage, err := s.stage(ctx, req)
	if err != nil {
		return nil, s.whilePending(req.GetVolumeId(), err, state.StagePart())
	}
	err = s.Reconciler.Ensure(ctx, req.GetVolumeId(), state.StagePart(), func(v *state.Volume) error {
		ask := *stage
		return s.remembering(req, v.AskStage(&ask, time.Now()))
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeStageVolumeResponse{}, nil
}

// stage translates the request.
func (s *Server) stage(ctx context.Context, req *csi.NodeStageVolumeRequest) (*state.Stage, error) {
	capability, readOnly, joined, err := s.asked(ctx, req, "staging_target_path", req.GetStagingTargetPath())
	if err != nil {
		return nil, err
	}
	if joined[state.EphemeralKey] == "true" {
		return nil, state.Errorf(state.InvalidArgument, "volume %s: an inline ephemeral volume is published without being staged", req.GetVolumeId())
	}
	return &state.Stage{
		Path: req.GetStagingTargetPath(), Capability: capability, ReadOnly: readOnly, Context: joined,
		Backend: s.Backends.Named(s.volumeOf(req)),
	}, nil
}

// NodeUnstageVolume asks for the end of the stage and of the device.
func (s *Server) NodeUnstageVolume(ctx context.Context, req *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	req, err := spell(ctx, s.Paths, req)
	if err != nil {
		return nil, err
	}
	if err := s.volumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := s.path(req.GetVolumeId(), "staging_target_path", req.GetStagingTargetPath()); err != nil {
		return nil, err
	}
	path := req.GetStagingTargetPath()
	err = s.Reconciler.Ensure(ctx, req.GetVolumeId(), state.StagePart(), func(v *state.Volume) error {
		return v.AskUnstage(path, time.Now())
	})
	if errors.Is(err, state.ErrStagedElsewhere) {
		err = s.Reconciler.Ensure(ctx, req.GetVolumeId(), state.TargetPart(path), func(v *state.Volume) error {
			return v.AskUnmount(path, time.Now())
		})
	}
	s.queries.forget(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}
