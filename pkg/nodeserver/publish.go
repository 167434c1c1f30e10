package nodeserver

import (
	"context"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// NodePublishVolume asks for the staged volume at the target path. A volume without a
// record may be staged all the same, if the store was lost. The worker finds out,
// because kubelet does not stage again what it believes staged.
func (s *Server) NodePublishVolume(ctx context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	req, err := spell(ctx, s.Paths, req)
	if err != nil {
		return nil, err
	}
	pending := []state.Part{state.TargetPart(req.GetTargetPath())}
	inline := req.GetVolumeContext()[state.EphemeralKey] == "true"
	if inline { // this call stages it, too
		pending = append(pending, state.StagePart())
	}
	target, err := s.target(ctx, req)
	var stage *state.Stage
	switch {
	case err != nil:
	case inline:
		stage, err = s.inlineStage(req, target)
	case req.GetStagingTargetPath() == "":
		err = state.Errorf(state.FailedPrecondition, "staging_target_path is missing: the volume must be staged first")
	default:
		err = s.path(req.GetVolumeId(), "staging_target_path", req.GetStagingTargetPath())
	}
	if err != nil {
		return nil, s.whilePending(req.GetVolumeId(), err, pending...)
	}
	err = s.Reconciler.Ensure(ctx, req.GetVolumeId(), state.TargetPart(target.Path), func(v *state.Volume) error {
		ask := *target
		if inline {
			return s.remembering(req, v.AskInline(stage, &ask, time.Now()))
		}
		if v.Stage == nil && v.Backend == "" {
			v.Backend = req.GetVolumeContext()[devices.BackendKey]
		}
		return s.remembering(req, v.AskPublish(&ask, req.GetStagingTargetPath(), time.Now()))
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodePublishVolumeResponse{}, nil
}

// inlineStage returns the stage of a volume that lives as long as this publish.
func (s *Server) inlineStage(req *csi.NodePublishVolumeRequest, target *state.Target) (*state.Stage, error) {
	id := req.GetVolumeId()
	switch {
	case target.Capability.Access != state.MountAccess:
		return nil, state.Errorf(state.InvalidArgument, "volume %s: an inline ephemeral volume must have a file system", id)
	case s.Inline == nil:
		return nil, state.Errorf(state.InvalidArgument, "volume %s: no backend of this plugin accepts inline ephemeral volumes: use a PersistentVolumeClaim", id)
	case s.Inline.Staging(id) == "":
		return nil, state.Errorf(state.InvalidArgument, "volume %s: an inline ephemeral volume must have an id that can be the name of a directory", id)
	}
	return &state.Stage{
		Path: s.Inline.Staging(id), Capability: target.Capability, Backend: s.Inline.Backend,
		Inline: &state.Inline{PodUID: req.GetVolumeContext()[state.PodUIDKey], Target: target.Path, Attributes: state.WithoutKubernetes(req.GetVolumeContext())},
	}, nil
}

// target translates the request without its staging path.
func (s *Server) target(ctx context.Context, req *csi.NodePublishVolumeRequest) (*state.Target, error) {
	capability, readOnly, joined, err := s.asked(ctx, req, "target_path", req.GetTargetPath())
	if err != nil {
		return nil, err
	}
	return &state.Target{Path: req.GetTargetPath(), Capability: capability, ReadOnly: readOnly || req.GetReadonly(), Context: joined}, nil
}

// NodeUnpublishVolume asks that the volume is not at the target path. That ends an
// inline ephemeral volume.
func (s *Server) NodeUnpublishVolume(ctx context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	req, err := spell(ctx, s.Paths, req)
	if err != nil {
		return nil, err
	}
	if err := s.volumeID(req.GetVolumeId()); err != nil {
		return nil, err
	}
	if err := s.path(req.GetVolumeId(), "target_path", req.GetTargetPath()); err != nil {
		return nil, err
	}
	err = s.Reconciler.Ensure(ctx, req.GetVolumeId(), state.TargetPart(req.GetTargetPath()), func(v *state.Volume) error {
		return v.AskEnd(req.GetTargetPath(), s.Inline.Staging(req.GetVolumeId()), time.Now())
	})
	if s.Records.Get(req.GetVolumeId()) == nil { // an inline volume is not unstaged by kubelet
		s.queries.forget(req.GetVolumeId())
	}
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnpublishVolumeResponse{}, nil
}
