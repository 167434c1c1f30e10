package nodeserver

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
)

// NodeExpandVolume asks for a size of backing, device and file system.
//
// kubelet takes InvalidArgument, NotFound and OutOfRange for infeasible and
// stops asking, so these are kept for what can never succeed.
func (s *Server) NodeExpandVolume(ctx context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	req, err := spell(ctx, s.Paths, req)
	if err != nil {
		return nil, err
	}
	id := req.GetVolumeId()
	if err := s.volumeID(id); err != nil {
		return nil, err
	}
	if err := s.volumePath(id, req.GetVolumePath()); err != nil {
		return nil, err
	}
	if staging := req.GetStagingTargetPath(); staging != "" {
		if err := wellFormed("staging_target_path", staging); err != nil {
			return nil, err
		}
	}
	if err := checkRange(req.GetCapacityRange()); err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	if req.GetVolumeCapability() != nil {
		if _, _, err := s.capability(req.GetVolumeCapability()); err != nil {
			return nil, err
		}
	}
	if err := s.standing(ctx, req); err != nil {
		return nil, err
	}
	bytes, limit := max(req.GetCapacityRange().GetRequiredBytes(), 1), req.GetCapacityRange().GetLimitBytes()
	err = s.Reconciler.Ensure(ctx, id, state.SizePart(), func(v *state.Volume) error { return v.AskSize(bytes, limit, time.Now()) })
	if err != nil {
		return nil, err
	}
	grown, err := s.Reconciler.Observe(ctx, &state.Volume{ID: id})
	if err != nil {
		return nil, err
	}
	if limit > 0 && grown.Device.Size > limit {
		return nil, state.Errorf(state.OutOfRange, "volume %s: it has %d bytes by now, more than the limit of %d, and never shrinks", id, grown.Device.Size, limit)
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: grown.Device.Size}, nil
}

// standing refuses a volume that is not staged here, and paths that have nothing
// to do with it. Only of a volume without a record does it look at the node.
func (s *Server) standing(ctx context.Context, req *csi.NodeExpandVolumeRequest) error {
	id, path, staging := req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath()
	record := s.Records.Get(id)
	if (record == nil || record.Stage == nil) && staging != "" && req.GetVolumeCapability() != nil && s.path("staging_target_path", staging) == nil {
		c, _, err := s.capability(req.GetVolumeCapability())
		if err != nil {
			return err
		}
		if err := s.adopt(ctx, id, staging, c, nil); err != nil {
			return err
		}
		record = s.Records.Get(id)
	}
	switch {
	case record == nil:
		have, err := s.Reconciler.Observe(ctx, &state.Volume{ID: id})
		if err != nil {
			return err
		}
		if have.Device.Missing {
			return state.Errorf(state.NotFound, "volume %s: no such volume on this node", id)
		}
		return state.Errorf(state.FailedPrecondition, "volume %s: %w", id, state.ErrNotStaged)
	case record.Stage == nil:
		return state.Errorf(state.FailedPrecondition, "volume %s: %w", id, state.ErrNotStaged)
	case record.Stage.Path != path && record.Stage.Path != staging && record.Targets[path] == nil:
		return state.Errorf(state.NotFound, "volume %s: neither staged nor published at %s", id, path)
	}
	return nil
}

// checkRange returns InvalidArgument for a range that no size meets, and
// OutOfRange for one that no volume does.
func checkRange(r *csi.CapacityRange) error {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return state.Errorf(state.InvalidArgument, "capacity_range holds a negative size")
	case limit > 0 && required > limit:
		return state.Errorf(state.InvalidArgument, "capacity_range requires %d bytes and limits them to %d", required, limit)
	case required > 1<<62:
		return state.Errorf(state.OutOfRange, "a volume cannot have %d bytes", required)
	}
	return nil
}
