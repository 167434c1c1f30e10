package main

import (
	"context"
	"encoding/json"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-node/csi-node/pkg/command"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

type (
	nodeCapability       = csi.NodeServiceCapability_RPC_Type
	controllerCapability = csi.ControllerServiceCapability_RPC_Type
)

// fakePlugin is a plugin of another driver. It records each request,
// except those for its capabilities, gives the answers of its fields, and keeps no
// state.
type fakePlugin struct {
	csi.UnimplementedIdentityServer
	csi.UnimplementedControllerServer
	csi.UnimplementedNodeServer
	Dir      string // for the test's files; the socket is in it
	Endpoint string

	notReady      bool
	node          []nodeCapability
	controller    []controllerCapability
	noController  bool
	volumes       []string // of ListVolumes, one a page
	endless       bool     // its pages never end
	nodeNotNeeded bool     // to expand
	age           string
	fail          error // of all but the questions

	mu    sync.Mutex
	calls []call
}

type call struct {
	method  string
	request string // as JSON
}

// newFakePlugin serves a plugin that offers everything, until the test ends.
func newFakePlugin(t *testing.T) *fakePlugin {
	t.Helper()
	dir := machine.ShortDir(t)
	p := &fakePlugin{
		Dir: dir, Endpoint: "unix://" + filepath.Join(dir, "csi.sock"),
		node: []nodeCapability{
			csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME, csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
			csi.NodeServiceCapability_RPC_GET_VOLUME_STATS, csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		},
		controller: []controllerCapability{
			csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME, csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		},
		volumes: []string{"vol-a", "vol-b", "vol-c"},
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
	require.NoError(t, err)
	server := grpc.NewServer(grpc.UnaryInterceptor(p.note))
	csi.RegisterIdentityServer(server, p)
	csi.RegisterControllerServer(server, p)
	csi.RegisterNodeServer(server, p)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	for name, value := range map[string]string{"CSI_ENDPOINT": p.Endpoint, "CSI_NODE_KUBELET_DIR": filepath.Join(dir, "kubelet"), "CSI_NODE_STATE_DIR": filepath.Join(dir, "state")} {
		t.Setenv(name, value)
	}
	return p
}

func (p *fakePlugin) note(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	method := path.Base(info.FullMethod)
	if !slices.Contains([]string{"GetPluginInfo", "GetPluginCapabilities", "Probe", "NodeGetInfo", "NodeGetCapabilities", "ControllerGetCapabilities"}, method) {
		raw, err := json.Marshal(command.Message{Message: req.(proto.Message)})
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		p.calls = append(p.calls, call{method, string(raw)})
		p.mu.Unlock()
		if p.fail != nil {
			return nil, p.fail
		}
	}
	return handler(ctx, req)
}

// requests returns what was noted since it was last asked.
func (p *fakePlugin) requests() []call {
	p.mu.Lock()
	defer p.mu.Unlock()
	calls := p.calls
	p.calls = nil
	return calls
}

func (p *fakePlugin) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: "fake.example", VendorVersion: "v9"}, nil
}

func (p *fakePlugin) GetPluginCapabilities(context.Context, *csi.GetPluginCapabilitiesRequest) (*csi.GetPluginCapabilitiesResponse, error) {
	return &csi.GetPluginCapabilitiesResponse{Capabilities: []*csi.PluginCapability{{Type: &csi.PluginCapability_Service_{
		Service: &csi.PluginCapability_Service{Type: csi.PluginCapability_Service_CONTROLLER_SERVICE},
	}}}}, nil
}

func (p *fakePlugin) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(!p.notReady)}, nil
}

func (p *fakePlugin) ControllerGetCapabilities(ctx context.Context, req *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	if p.noController {
		return p.UnimplementedControllerServer.ControllerGetCapabilities(ctx, req)
	}
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, c := range p.controller {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: c}}})
	}
	return resp, nil
}

func (p *fakePlugin) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range p.node {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}}})
	}
	return resp, nil
}

func (p *fakePlugin) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{NodeId: "node-7", MaxVolumesPerNode: 16, AccessibleTopology: &csi.Topology{Segments: map[string]string{"zone": "z1", "rack": "r2"}}}, nil
}

func (p *fakePlugin) CreateVolume(_ context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{
		VolumeId: "id-" + req.GetName(), CapacityBytes: max(req.GetCapacityRange().GetRequiredBytes(), 4096), VolumeContext: map[string]string{"b": "2", "a": "1"},
	}}, nil
}

func (p *fakePlugin) DeleteVolume(context.Context, *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	return &csi.DeleteVolumeResponse{}, nil
}

func (p *fakePlugin) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	i := 0
	if req.GetStartingToken() != "" {
		i = slices.Index(p.volumes, req.GetStartingToken())
	}
	resp := &csi.ListVolumesResponse{}
	if i < len(p.volumes) {
		resp.Entries = []*csi.ListVolumesResponse_Entry{{Volume: &csi.Volume{VolumeId: p.volumes[i], CapacityBytes: int64(i+1) << 30}}}
	}
	if i+1 < len(p.volumes) {
		resp.NextToken = p.volumes[i+1]
	} else if p.endless {
		resp.NextToken = p.volumes[0]
	}
	return resp, nil
}

func (p *fakePlugin) ControllerExpandVolume(_ context.Context, req *csi.ControllerExpandVolumeRequest) (*csi.ControllerExpandVolumeResponse, error) {
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: req.GetCapacityRange().GetRequiredBytes() + 1, NodeExpansionRequired: !p.nodeNotNeeded}, nil
}

func (p *fakePlugin) NodeStageVolume(context.Context, *csi.NodeStageVolumeRequest) (*csi.NodeStageVolumeResponse, error) {
	return &csi.NodeStageVolumeResponse{}, nil
}

func (p *fakePlugin) NodePublishVolume(_ context.Context, req *csi.NodePublishVolumeRequest) (*csi.NodePublishVolumeResponse, error) {
	return &csi.NodePublishVolumeResponse{}, os.Mkdir(req.GetTargetPath(), 0o750)
}

func (p *fakePlugin) NodeUnpublishVolume(_ context.Context, req *csi.NodeUnpublishVolumeRequest) (*csi.NodeUnpublishVolumeResponse, error) {
	return &csi.NodeUnpublishVolumeResponse{}, os.Remove(req.GetTargetPath())
}

func (p *fakePlugin) NodeUnstageVolume(context.Context, *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (p *fakePlugin) NodeExpandVolume(_ context.Context, req *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	return &csi.NodeExpandVolumeResponse{CapacityBytes: req.GetCapacityRange().GetRequiredBytes()}, nil
}

func (p *fakePlugin) NodeGetVolumeStats(ctx context.Context, _ *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	if p.age != "" {
		if err := grpc.SetHeader(ctx, metadata.Pairs("csi-node-stats-age", p.age)); err != nil {
			return nil, err
		}
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: 3 << 30, Used: 1 << 30, Available: 2<<30 - 5},
		{Unit: csi.VolumeUsage_INODES, Total: 100, Used: 1, Available: 99},
	}}, nil
}
