package driver

import (
	"context"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// identity serves the CSI Identity RPCs (spec v1.13, "Identity Service RPC").
type identity struct {
	csi.UnimplementedIdentityServer
	name, version string
	capabilities  []*csi.PluginCapability
	lacks         func() error
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: i.name, VendorVersion: i.version}, nil
}

func (i *identity) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: i.capabilities}, nil
}

// capabilities are those of the backends and those that the driver's builder adds.
func (p *plugin) capabilities() (all []*csi.PluginCapability) {
	service := func(t csi.PluginCapability_Service_Type) {
		all = append(all, &csi.PluginCapability{Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}}})
	}
	if p.controller != nil {
		service(csi.PluginCapability_Service_CONTROLLER_SERVICE)
	}
	if p.properties.NodeLocal || p.options.Topology != nil {
		service(csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS)
	}
	if _, grows := ability[devices.Grower](p); grows {
		all = append(all, &csi.PluginCapability{
			Type: &csi.PluginCapability_VolumeExpansion_{VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE}},
		})
	}
	return append(all, p.options.Capabilities...)
}

// expands reports whether NodeExpandVolume makes volumes larger: a backend does, or a Controller
// of the driver's builder, whose volumes' file systems follow.
func (p *plugin) expands() bool {
	return slices.ContainsFunc(p.capabilities(), func(c *csi.PluginCapability) bool { return c.GetVolumeExpansion() != nil })
}

// Probe answers ready: the socket serves only once the store is open and every record is
// queued. It returns FailedPrecondition if programs or loop devices are missing. A pool that is
// away is told by all else, and is no reason for that: external-provisioner would not start, so
// that Kubernetes went on counting with the room of before, and livenessprobe would restart a
// plugin that works on other disks.
func (i *identity) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	if err := i.lacks(); err != nil {
		return nil, state.Errorf(state.FailedPrecondition, "%w", err)
	}
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, nil
}
