// Package controllerserver serves the CSI Controller RPCs of a pool of volumes
// that live on this node: create, delete, list, validate, capacity. It never
// touches a mount.
//
// It runs beside the node service on every node (external-provisioner with
// --node-deployment), and each pod of it answers for its own pool. Errors are
// classified by package state; the rules are those of the CSI specification
// v1.13, section "Controller Service RPC". EXPAND_VOLUME is not among the
// capabilities: NodeExpandVolume grows the pool's file as well.
package controllerserver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// Pool keeps the volumes; *pool.Pool is one.
type Pool interface {
	// Create returns AlreadyExists together with the volume that is there.
	Create(ctx context.Context, v pool.Volume) (pool.Volume, error)
	Get(ctx context.Context, id string) (pool.Volume, error)
	// IDs returns the ids of all volumes, also of those that Get cannot read.
	IDs(ctx context.Context) ([]string, error)
	Capacity(ctx context.Context) (pool.Capacity, error)
}

// Deleter deletes a volume that nothing is attached to; *loop.Backend is one.
type Deleter interface {
	Delete(ctx context.Context, volume string) error
}

// Intents tells what is asked of a volume on this node; *store.Store does.
type Intents interface {
	Get(id string) *state.Volume
}

// Filesystems knows what this node can make; *filesystem.Host is one.
type Filesystems interface {
	Types() []string
	Default(bytes int64) string
	Smallest(fsType string) int64
}

// Config is what a Server is made of.
type Config struct {
	NodeID      string
	TopologyKey string // of the segment that names the node

	Filesystems Filesystems
	Pool        Pool
	Deleter     Deleter
	Intents     Intents
}

// Server serves the CSI Controller RPCs. Its methods may be called concurrently.
type Server struct {
	csi.UnimplementedControllerServer
	Config
}

// New returns a Server.
func New(cfg Config) *Server { return &Server{Config: cfg} }

var capabilities = []csi.ControllerServiceCapability_RPC_Type{
	csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
	csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
	csi.ControllerServiceCapability_RPC_GET_CAPACITY,
	csi.ControllerServiceCapability_RPC_GET_VOLUME,
	csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
}

// ControllerGetCapabilities lists the optional RPCs that work.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	for _, c := range capabilities {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: c}},
		})
	}
	return resp, nil
}
