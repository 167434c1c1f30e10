package nodeserver

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// NodeGetVolumeHealth returns what is wrong with a volume, and nothing for a healthy one. That
// a volume of which something is asked cannot be looked at is wrong with it, and no error: to
// kubelet an error says nothing of the volume.
// It answers within answerTimeout, even if the volume does not.
func (s *Server) NodeGetVolumeHealth(ctx context.Context, req *csi.NodeGetVolumeHealthRequest) (*csi.NodeGetVolumeHealthResponse, error) {
	id := req.GetVolumeId()
	if err := s.volumeID(id); err != nil {
		return nil, err
	}
	for _, given := range []struct{ field, path string }{{"volume_publish_path", req.GetVolumePublishPath()}, {"staging_target_path", req.GetStagingTargetPath()}} {
		if given.path != "" && !filepath.IsAbs(given.path) {
			return nil, state.Errorf(state.InvalidArgument, "volume %s: %s %.200q is not an absolute path", id, given.field, given.path)
		}
	}
	record := s.Records.Get(id)
	want := record
	if want == nil {
		want = &state.Volume{ID: id}
	}
	have, err := s.observe(ctx, want)
	if reason := unusable(err); reason != "" && record != nil {
		return volumeHealth(id, report.Finding{Kind: report.Inaccessible, Reason: reason, Message: err.Error()}), nil
	}
	if err != nil {
		return nil, err
	}
	if record == nil && have.Device.Missing {
		return nil, state.Errorf(state.NotFound, "volume %s: no such volume on this node", id)
	}
	return volumeHealth(id, s.Reconciler.Report(want, have).Health()...), nil
}

// silence is how long a look must have run before its volume is said not to answer: a little
// less than its caller waits, who began before it.
const silence = answerTimeout * 9 / 10

// unusable returns the reason of a volume whose look failed with err; empty: err says nothing of
// the volume, but that the caller has left, or had no time for the look.
func unusable(err error) (reason string) {
	class := state.ClassOf(err)
	switch hangs := (noAnswer{}); {
	case errors.As(err, &hangs) && (hangs.cause != nil || time.Since(hangs.since) >= silence):
		return "DoesNotAnswer"
	case err == nil, class == state.DeadlineExceeded, class == state.Canceled:
		return ""
	}
	return "StorageUnusable"
}

func volumeHealth(id string, findings ...report.Finding) *csi.NodeGetVolumeHealthResponse {
	health := &csi.VolumeHealth{VolumeId: id}
	for _, f := range findings {
		status := map[report.FindingKind]csi.VolumeHealthErrorType{
			report.Degraded:     csi.VolumeHealthErrorType_DEGRADED,
			report.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE,
			report.DataLoss:     csi.VolumeHealthErrorType_DATA_LOSS,
		}[f.Kind]
		health.HealthStatuses = append(health.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: f.Reason, Message: f.Message})
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health}
}

// observe looks at a volume as the Reconciler does, but gives up in time.
func (s *Server) observe(ctx context.Context, want *state.Volume) (state.Actual, error) {
	var have state.Actual
	_, err := s.queries.ask(ctx, want.ID, "", func(ctx context.Context) (_ []*csi.VolumeUsage, err error) {
		have, err = s.Reconciler.Observe(ctx, want)
		return nil, err
	})
	if err != nil {
		volume := "volume " + want.ID + ": "
		return state.Actual{}, state.Reword(err, volume+strings.TrimPrefix(err.Error(), volume))
	}
	return have, nil
}

// NodeGetStorageHealth returns what is wrong with the storage of the backends. Unimplemented:
// none of them can check it.
func (s *Server) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (*csi.NodeGetStorageHealthResponse, error) {
	if s.Storage == nil {
		return nil, state.Errorf(state.Unimplemented, "NodeGetStorageHealth: no backend of this plugin can check its storage; it has %s", strings.Join(s.Backends.Names(), ", "))
	}
	resp := &csi.NodeGetStorageHealthResponse{}
	for _, f := range s.Storage(ctx) {
		status := map[report.FindingKind]csi.StorageHealthErrorType{
			report.Degraded:     csi.StorageHealthErrorType_STORAGE_DEGRADED,
			report.Inaccessible: csi.StorageHealthErrorType_STORAGE_UNREACHABLE,
		}[f.Kind]
		same := slices.IndexFunc(resp.BackendHealth, func(e *csi.NodeGetStorageHealthResponse_StorageBackendHealth) bool {
			return e.Status == status && e.Reason == f.Reason
		})
		if same >= 0 { // csi.proto, StorageBackendHealth.reason: at most one message of a status and a reason
			resp.BackendHealth[same].Message += "; " + f.Message
			continue
		}
		resp.BackendHealth = append(resp.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{Status: status, Reason: f.Reason, Message: f.Message})
	}
	return resp, nil
}
