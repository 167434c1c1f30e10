package driver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-node/csi-node/pkg/state"
)

// identity serves the CSI Identity RPCs (spec v1.13, "Identity Service RPC").
type identity struct {
	csi.UnimplementedIdentityServer
	name, version string
	checks        []func(context.Context) error // of what the plugin cannot do without
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.name, VendorVersion: i.version}, nil
}

func (i *identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	resp := &csi.GetPluginCapabilitiesResponse{}
	for _, t := range []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE,
		csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
	} {
		resp.Capabilities = append(resp.Capabilities, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}},
		})
	}
	resp.Capabilities = append(resp.Capabilities, &csi.PluginCapability{
		Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}},
	})
	return resp, nil
}

// Probe answers ready: the socket serves only once the store is open and every
// record is queued. It returns FailedPrecondition while something is missing.
func (i *identity) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if err := i.healthy(ctx); err != nil {
		return nil, state.Errorf(state.FailedPrecondition, "%w", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}

func (i *identity) healthy(ctx context.Context) error {
	for _, check := range i.checks {
		if err := check(ctx); err != nil {
			return err
		}
	}
	return nil
}

// checks are of what may go missing while the plugin runs.
func (p *plugin) checks() []func(context.Context) error {
	return []func(context.Context) error{
		p.pool.Check,
		p.devices.Check,
		func(context.Context) error { return p.filesystem.CheckPrograms() },
	}
}
