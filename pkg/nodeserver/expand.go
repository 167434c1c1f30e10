package nodeserver

import (
	"context"
	"fmt"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// NodeExpandVolume asks for a size of backing, device and file system.
//
// kubelet stops asking after InvalidArgument, NotFound and OutOfRange, so these are
// returned only for what can never succeed.
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
	var c state.Capability
	if req.GetVolumeCapability() != nil {
		if c, _, err = s.capability(ctx, s.recorded(id), req.GetVolumeCapability()); err != nil {
			return nil, err
		}
	}
	if err := s.checkExpandPaths(req); err != nil {
		return nil, err
	}
	staging := req.GetStagingTargetPath()
	if c.Access == "" || staging == "" || s.path(id, "staging_target_path", staging) != nil {
		staging, c = "", state.Capability{} // it does not tell how a volume without a record is staged
	}
	bytes, limit := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	size, err := s.Reconciler.EnsureSize(ctx, id, func(v *state.Volume) error {
		if err := v.Presume(staging, c, nil, time.Now()); err != nil {
			return err
		}
		overhead := s.Backends.Overhead(devices.Recorded(v).Context) // the backend's device is larger by that
		least, most := bytes+overhead, min(limit, devices.LargestBytes)
		if limit > 0 {
			most += overhead
		}
		if bytes == 0 { // what its device has will do
			least = 1
		}
		return s.remembering(req, v.AskSize(least, most, time.Now()))
	})
	if state.ClassOf(err) == state.AlreadyExists { // of the stage that it waits for, and no code of this call
		err = state.Errorf(state.FailedPrecondition, "%w", err)
	}
	if err != nil {
		return nil, err
	}
	if limit > 0 && size > limit {
		return nil, state.Errorf(state.OutOfRange, "volume %s: it has %s by now, more than the limit of %s, and never shrinks", id, state.FormatSize(size), state.FormatSize(limit))
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: size}, nil
}

// checkExpandPaths refuses paths that have nothing to do with a staged volume. If the volume
// has no record, the worker finds out whether it exists, and whether it is staged
// all the same.
func (s *Server) checkExpandPaths(req *csi.NodeExpandVolumeRequest) error {
	record, path := s.Records.Get(req.GetVolumeId()), req.GetVolumePath()
	switch {
	case record == nil || record.Stage == nil || record.Stage.Provisional:
	case record.Stage.Path != path && record.Stage.Path != req.GetStagingTargetPath() && record.Targets[path] == nil:
		return state.Errorf(state.NotFound, "volume %s: neither staged nor published at %s", req.GetVolumeId(), path)
	}
	return nil
}

// recorded is a volume as its record has it, for requests that tell only the id.
func (s *Server) recorded(id string) devices.Volume {
	if record := s.Records.Get(id); record != nil {
		return devices.Recorded(record)
	}
	return devices.Volume{ID: id}
}

// checkRange returns InvalidArgument for a range without any size in it, and
// OutOfRange for one that no volume can meet.
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
