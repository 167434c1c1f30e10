package nodeserver

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
)

// sizeUnit is what sizes are rounded up to, in bytes: the largest sector size.
const sizeUnit = 4096

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
	have, err := s.standing(ctx, req)
	if err != nil {
		return nil, err
	}
	bytes, err := wantedSize(req.GetCapacityRange(), max(have.Device.Size, have.Device.Capacity))
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	err = s.Reconciler.Ensure(ctx, id, state.SizePart(), func(v *state.Volume) error { return v.AskSize(bytes, time.Now()) })
	if err != nil {
		return nil, err
	}
	grown, err := s.Reconciler.Observe(ctx, &state.Volume{ID: id})
	if err != nil {
		return nil, err
	}
	if limit := req.GetCapacityRange().GetLimitBytes(); limit > 0 && grown.Device.Size > limit {
		return nil, state.Errorf(state.OutOfRange, "volume %s: it has %d bytes by now, more than the limit of %d, and never shrinks", id, grown.Device.Size, limit)
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: grown.Device.Size}, nil
}

// standing looks at a volume that is staged here, if the request's paths have to do with it.
func (s *Server) standing(ctx context.Context, req *csi.NodeExpandVolumeRequest) (state.Actual, error) {
	id, path, staging := req.GetVolumeId(), req.GetVolumePath(), req.GetStagingTargetPath()
	none := state.Actual{}
	have, err := s.Reconciler.Observe(ctx, &state.Volume{ID: id})
	if err != nil {
		return none, err
	}
	record := s.Records.Get(id)
	if (record == nil || record.Stage == nil) && staging != "" && req.GetVolumeCapability() != nil && s.path("staging_target_path", staging) == nil {
		c, _, err := s.capability(req.GetVolumeCapability())
		if err != nil {
			return none, err
		}
		if err := s.settleFSType(ctx, id, &c); err != nil {
			return none, err
		}
		if err := s.adopt(ctx, id, staging, c, nil); err != nil {
			return none, err
		}
		record = s.Records.Get(id)
	}
	switch {
	case record == nil && have.Device.Missing:
		return none, state.Errorf(state.NotFound, "volume %s: no such volume on this node", id)
	case record == nil || record.Stage == nil:
		return none, state.Errorf(state.FailedPrecondition, "volume %s: %w", id, state.ErrNotStaged)
	case record.Stage.Path != path && record.Stage.Path != staging && record.Targets[path] == nil:
		return none, state.Errorf(state.NotFound, "volume %s: neither staged nor published at %s", id, path)
	}
	return have, nil
}

// checkRange returns InvalidArgument for a range that no size meets.
func checkRange(r *csi.CapacityRange) error {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return state.Errorf(state.InvalidArgument, "capacity_range holds a negative size")
	case limit > 0 && required > limit:
		return state.Errorf(state.InvalidArgument, "capacity_range requires %d bytes and limits them to %d", required, limit)
	}
	return nil
}

// wantedSize returns the size in bytes that a sound capacity range asks of a
// volume that has some already.
func wantedSize(r *csi.CapacityRange, have int64) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case limit > 0 && limit < have:
		return 0, state.Errorf(state.OutOfRange, "the volume has %d bytes already, more than the limit of %d, and never shrinks", have, limit)
	case required <= have:
		return have, nil
	case required > 1<<62:
		return 0, state.Errorf(state.OutOfRange, "a volume cannot have %d bytes", required)
	}
	rounded := (required + sizeUnit - 1) / sizeUnit * sizeUnit
	if limit > 0 && rounded > limit {
		return 0, state.Errorf(state.OutOfRange, "sizes are multiples of %d bytes, and none lies between %d and %d", sizeUnit, required, limit)
	}
	return rounded, nil
}
