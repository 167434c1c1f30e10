// Package controllerserver serves the CSI Controller RPCs over the backends that
// create volumes (devices.Provisioner): create, delete, list, validate, capacity. It
// never touches a mount. Whether a request is valid, and whether an existing volume
// meets it, is decided here; a backend creates what it is told to.
//
// It runs beside the node service on every node (external-provisioner with
// --node-deployment), and each pod of it answers for its own volumes. Errors are
// classified by package state; the rules are those of the CSI specification
// v1.13, section "Controller Service RPC". EXPAND_VOLUME is not among the
// capabilities: NodeExpandVolume grows the backend's volume as well.
//
// Read create.go first: it shows how a request is checked, given to a backend, and
// how the result is compared with what was asked for.
package controllerserver

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Intents holds what is asked of a volume on this node; *store.Store is one.
type Intents interface {
	Get(id string) *state.Volume
}

// Filesystems describes the file systems that this node can make; *filesystem.Host is
// one.
type Filesystems interface {
	Types() []string
	Default(bytes int64) string
	Smallest(fsType string) int64
}

// Config is what a Server is made of.
type Config struct {
	NodeID string // as errors call the node
	// Topology holds the segments from which a volume that is created here is
	// accessible; empty: from everywhere.
	Topology map[string]string
	// MoreTopology returns further segments that this node is in, which a CO may name
	// together with those of Topology; nil: there are none.
	MoreTopology func(ctx context.Context) (map[string]string, error)

	Filesystems Filesystems
	Backends    *devices.Set
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

// Provisions reports whether any backend creates volumes. If none does, every RPC but
// ControllerGetCapabilities is Unimplemented.
func (s *Server) Provisions() bool { return len(s.Backends.Provisioners()) > 0 }

func (s *Server) provisions(rpc string) error {
	if s.Provisions() {
		return nil
	}
	return state.Errorf(state.Unimplemented, "%s: no backend of this plugin creates volumes; it has %s", rpc, strings.Join(s.Backends.Names(), ", "))
}

// ControllerGetCapabilities lists the optional RPCs that work.
func (s *Server) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	resp := &csi.ControllerGetCapabilitiesResponse{}
	if !s.Provisions() {
		return resp, nil
	}
	for _, c := range capabilities {
		resp.Capabilities = append(resp.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: c}},
		})
	}
	return resp, nil
}
