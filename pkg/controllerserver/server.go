// Package controllerserver serves the CSI Controller RPCs over the backends that
// make volumes (devices.Provisioner): create, delete, list, validate, capacity. It
// never touches a mount. What makes a request good, and an existing volume as it was
// asked for, is decided here; a backend makes what it is told to.
//
// It runs beside the node service on every node (external-provisioner with
// --node-deployment), and each pod of it answers for its own volumes. Errors are
// classified by package state; the rules are those of the CSI specification
// v1.13, section "Controller Service RPC". EXPAND_VOLUME is not among the
// capabilities: NodeExpandVolume grows the backend's volume as well.
package controllerserver

import (
	"context"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// Intents tells what is asked of a volume on this node; *state.Store does.
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
	NodeID string // as errors call the node
	// Topology is the segments that a volume made here is accessible from; empty:
	// from everywhere.
	Topology map[string]string

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

// Provisions reports whether a backend makes volumes; else every other RPC is
// Unimplemented.
func (s *Server) Provisions() bool { return len(s.Backends.Provisioners()) > 0 }

func (s *Server) provisions(rpc string) error {
	if s.Provisions() {
		return nil
	}
	return state.Errorf(state.Unimplemented, "%s: no backend of this plugin makes volumes; it has %s", rpc, strings.Join(s.Backends.Names(), ", "))
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
