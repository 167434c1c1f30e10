package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// ValidateVolumeCapabilities confirms the capabilities and parameters if the volume
// has all of them. If not, the message names the first that it lacks.
//
// NotFound: there is no such volume.
func (s *Server) ValidateVolumeCapabilities(ctx context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if err := s.provisions("ValidateVolumeCapabilities"); err != nil {
		return nil, err
	}
	id := req.GetVolumeId()
	if id == "" {
		return nil, state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	if err := complete(req.GetVolumeCapabilities()); err != nil {
		return nil, fmt.Errorf("volume %s: %w", id, err)
	}
	name, p, volume, err := s.get(ctx, devices.Volume{ID: id, Context: req.GetVolumeContext(), Secrets: devices.NewSecrets(req.GetSecrets())})
	if err != nil {
		return nil, err
	}
	if problem := s.lacks(name, p, volume, req); problem != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: fmt.Sprintf("volume %s: %s", id, problem)}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// lacks names the first thing in the request that the volume does not have. It is
// empty if the volume has everything.
func (s *Server) lacks(backend string, p devices.Provisioner, v devices.Provisioned, req *csi.ValidateVolumeCapabilitiesRequest) string {
	fsType, err := s.fsTypeOf(req.GetVolumeCapabilities(), cmp.Or(v.Use.FSType, s.Filesystems.Default(v.Bytes)))
	if err != nil {
		return err.Error()
	}
	if v.Use != (devices.Use{}) && v.Use != useOf(fsType) {
		return fmt.Sprintf("it was created as %s, not as %s", v.Use, useOf(fsType))
	}
	for key, value := range req.GetVolumeContext() {
		// external-provisioner and kubelet add these; the backend chose the others.
		if strings.HasPrefix(key, state.KubernetesPrefix) || strings.HasPrefix(key, "storage.kubernetes.io/") || key == devices.BackendKey && value == backend {
			continue
		}
		if has, there := v.Context[key]; !there {
			return fmt.Sprintf("its volume_context has no key %q", key)
		} else if has != value {
			return fmt.Sprintf("its volume_context has another value of %q", key)
		}
	}
	if len(req.GetMutableParameters()) > 0 {
		return "mutable_parameters: this driver has none"
	}
	if name, named := req.GetParameters()[devices.BackendKey]; named && name != backend {
		return fmt.Sprintf("it has %s %s, not %.200s", devices.BackendKey, backend, name)
	}
	layers, err := s.Backends.LayerContext(req.GetParameters())
	if err != nil {
		return err.Error()
	}
	if has, _ := s.Backends.LayerContext(v.Context); differs(notNil(has), layers, func(key string) bool { _, named := layers[key]; return named }) != "" {
		return "it has " + differs(notNil(has), layers, func(string) bool { return true })
	}
	own := ownParameters(req.GetParameters(), layers)
	want, err := p.CheckParameters(own)
	if err != nil {
		return err.Error()
	}
	if other := differs(v.Parameters, want, func(key string) bool { _, named := own[key]; return named }); other != "" {
		return "it has " + other
	}
	return ""
}
