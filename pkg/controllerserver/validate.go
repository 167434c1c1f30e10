package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// ValidateVolumeCapabilities confirms the capabilities and parameters if the
// volume has them all; else its message says which it has not.
//
// NotFound: there is no such volume.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	id := req.GetVolumeId()
	if id == "" {
		return nil, state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	if err := complete(req.GetVolumeCapabilities()); err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	volume, err := s.get(ctx, id)
	if err != nil {
		return nil, err
	}
	if problem := s.lacks(volume, req); problem != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: fmt.Sprintf("volume %s: %s", id, problem)}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// lacks says what of the request the volume has not; empty if it has all.
func (s *Server) lacks(v pool.Volume, req *csi.ValidateVolumeCapabilitiesRequest) string {
	fsType, err := s.fsTypeOf(req.GetVolumeCapabilities(), cmp.Or(v.FSType, s.Filesystems.Default(v.Bytes)))
	if err != nil {
		return err.Error()
	}
	if fsType != v.FSType {
		return fmt.Sprintf("it was created as %s, not as %s", use(v.FSType), use(fsType))
	}
	for key := range req.GetVolumeContext() {
		// CreateVolume gives none; these are external-provisioner's and kubelet's.
		if !strings.HasPrefix(key, kubernetesPrefix) && !strings.HasPrefix(key, "storage.kubernetes.io/") {
			return fmt.Sprintf("its volume_context has no key %q", key)
		}
	}
	if len(req.GetMutableParameters()) > 0 {
		return "mutable_parameters: this driver has none"
	}
	want, err := parse(req.GetParameters())
	if err != nil {
		return err.Error()
	}
	named := slices.DeleteFunc(keys(), func(key string) bool { _, is := req.GetParameters()[key]; return !is })
	if other := differs(v, want, named); other != "" {
		return "it has " + other
	}
	return ""
}
