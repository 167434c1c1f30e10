package nodeserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// NodeGetVolumeHealth tells what is wrong with a volume, nothing if nothing is.
// It answers within answerTimeout, even if the volume does not.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	id := req.GetVolumeId()
	if err := s.volumeID(ctx, id); err != nil {
		return nil, err
	}
	record := s.Records.Get(id)
	want := record
	if want == nil {
		want = &state.Volume{ID: id}
	}
	have, err := s.observe(ctx, want)
	if hangs := (noAnswer{}); errors.As(err, &hangs) && record != nil {
		return &csi.NodeGetVolumeHealthResponse{VolumeHealth: &csi.VolumeHealth{VolumeId: id, HealthStatuses: []*csi.VolumeHealth_VolumeHealthEntry{
			{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "DoesNotAnswer", Message: err.Error()},
		}}}, nil
	}
	if err != nil {
		return nil, err
	}
	if record == nil && have.Device.Missing {
		return nil, state.Errorf(state.NotFound, "volume %s: no such volume on this node", id)
	}
	health := &csi.VolumeHealth{VolumeId: id}
	say := func(status csi.VolumeHealthErrorType, reason, message string) {
		for _, e := range health.HealthStatuses { // (status, reason) must be unique
			if e.Status == status && e.Reason == reason {
				e.Message += "; " + message
				return
			}
		}
		health.HealthStatuses = append(health.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: reason, Message: message})
	}
	if d := have.Device; d.Formatted != "" && have.Contents.Kind == state.ContentsBlank {
		say(csi.VolumeHealthErrorType_DATA_LOSS, "FilesystemLost", fmt.Sprintf("the volume was formatted as %s and is blank now", d.Formatted))
	} else if !d.Attached() && d.Size < d.Capacity { // a device lags behind its backing while it grows
		say(csi.VolumeHealthErrorType_DATA_LOSS, "BackingTruncated", fmt.Sprintf("the volume has %d bytes of %d", d.Size, d.Capacity))
	}
	problems := reconciler.MakePlan(want, have).Problems()
	for _, failure := range s.Reconciler.Failures(id) {
		if !slices.ContainsFunc(problems, func(p reconciler.PartProblem) bool { return p.Part == failure.Part }) {
			problems = append(problems, failure)
		}
	}
	for _, p := range problems {
		kind, reason := csi.VolumeHealthErrorType_DEGRADED, "TargetUnusable"
		switch p.Part.Kind {
		case state.StageKind:
			kind, reason = csi.VolumeHealthErrorType_INACCESSIBLE, "StageUnusable"
		case state.SizeKind:
			reason = "SizeNotReached"
		}
		say(kind, reason, p.Text)
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}, nil
}

// observe looks at a volume as the Reconciler does, but gives up in time.
func (s *Server) observe(ctx context.Context, want *state.Volume) (state.Actual, error) {
	var have state.Actual
	_, err := s.probes.ask(ctx, want.ID, "", func(ctx context.Context) (_ []*csi.VolumeUsage, err error) {
		have, err = s.Reconciler.Observe(ctx, want)
		return nil, err
	})
	if err != nil {
		return state.Actual{}, fmt.Errorf("volume %s: %w", want.ID, err)
	}
	return have, nil
}

// NodeGetStorageHealth tells what is wrong with the place that volumes are kept in.
func (s *Server) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	resp := &csi.NodeGetStorageHealthResponse{}
	err := s.StorageHealth(ctx)
	if err == nil {
		return resp, nil
	}
	health := &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: csi.StorageHealthErrorType_STORAGE_UNREACHABLE, Reason: "PoolUnusable", Message: err.Error()}
	if state.ClassOf(err) == state.ResourceExhausted {
		health.Status, health.Reason = csi.StorageHealthErrorType_STORAGE_DEGRADED, "PoolFull"
	}
	resp.BackendHealth = append(resp.BackendHealth, health)
	return resp, nil
}
