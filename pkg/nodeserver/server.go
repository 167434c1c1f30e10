// Package nodeserver turns the CSI Node RPCs into intents, waits for them, and
// turns the outcome into responses. It never touches a mount or a device.
//
// Errors are classified by package state; the gRPC server's interceptor turns
// the class into a status code. The rules are those of the CSI specification
// v1.13, section "Node Service RPC". A request to stage, unstage, publish,
// unpublish or expand looks at no mount and no device: whether it is valid is decided from
// the request, from the record and from the way to its paths (mounts.Host.Check);
// everything else is the worker's. Only questions (stats, health) look at the node.
//
// Read stage.go first: a request becomes an edit of the volume's record, and
// Reconciler.Ensure waits for it. validate.go holds the checks that requests share;
// queries.go bounds the questions about a volume that does not answer.
package nodeserver

import (
	"context"
	"fmt"
	"maps"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/pkg/state"
)

// Reconciler carries out intents; *reconciler.Reconciler is one.
type Reconciler interface {
	Ensure(ctx context.Context, id string, part state.Part, edit func(*state.Volume) error) error
	// Remember keeps the secrets of a volume for as long as anything is asked of
	// it. It does not block, and may be called by an edit.
	Remember(id string, secrets map[string]string)
	// EnsureSize is Ensure for the size, and returns the bytes that the volume has.
	EnsureSize(ctx context.Context, id string, edit func(*state.Volume) error) (bytes int64, err error)
	Observe(ctx context.Context, want *state.Volume) (state.Actual, error)
	// Report reports on a volume; have is what Observe has just returned.
	Report(want *state.Volume, have state.Actual) report.Volume
	// Changed makes the workers look at the volumes at a path.
	Changed(path string)
}

// Records reads the desired state; *store.Store is one.
type Records interface {
	Get(id string) *state.Volume
	// IsAt reports whether a stage or a target of the record has the path.
	IsAt(id, path string) bool
}

// Backends are the backends of this plugin; a *devices.Set is one.
type Backends interface {
	// Names returns the names of the backends.
	Names() []string
	// Named returns the name of the backend that the context of a volume asks for.
	Named(v devices.Volume) string
	// Validate returns InvalidArgument for a volume that its backend can never
	// have, or whose backend the plugin lacks. It is pure.
	Validate(v devices.Volume) error
	// ValidateID returns InvalidArgument for an id that no volume of any backend can have.
	ValidateID(id string) error
	// PublishIdentity reports whether a key of the publish context is part of
	// what is asked for.
	PublishIdentity(v devices.Volume, key string) bool
	// Source returns what is mounted for a volume; not ok: it has a device.
	Source(ctx context.Context, v devices.Volume) (source state.Source, ok bool, err error)
	// Overhead returns how many bytes of a volume with that context its layers take.
	Overhead(context map[string]string) int64
}

// Paths answers for the paths and mounts in requests; *mounts.Host is one.
type Paths interface {
	// Spell returns the one spelling that a path has in intents and in the mount
	// table; a path that Check refuses may come back as it is. It waits until ctx ends.
	Spell(ctx context.Context, path string) (string, error)
	// Check returns InvalidArgument for a path that no request may name.
	Check(path string) error
	// Usage returns what is mounted at a path and how full it is.
	Usage(ctx context.Context, path string) (state.Mount, state.Usage, error)
}

// Filesystems lists the file systems that this node can make; *filesystem.Host is one.
type Filesystems interface {
	Types() []string
}

// Config is what a Server is made of.
type Config struct {
	NodeID string
	// Topology holds the segments from which volumes that are made on this node are
	// accessible; empty: from everywhere.
	Topology map[string]string
	// MoreTopology returns further segments that this node is in; nil: there are none.
	MoreTopology func(ctx context.Context) (map[string]string, error)
	MaxVolumes   int64 // 0: no limit

	Backends    Backends
	Reconciler  Reconciler
	Records     Records
	Filesystems Filesystems
	Paths       Paths
	// Inline says where inline ephemeral volumes are; nil: there are none.
	Inline *reconciler.Inline
	// Expands: there are volumes that NodeExpandVolume makes larger.
	Expands bool
	// Storage returns what is wrong with the places that volumes are kept in; nil: nobody
	// can tell.
	Storage func(ctx context.Context) []report.Finding
}

// Server serves the CSI Node RPCs. Its methods may be called concurrently.
type Server struct {
	csi.UnimplementedNodeServer
	Config
	queries queries
}

// New returns a Server.
func New(cfg Config) *Server { return &Server{Config: cfg} }

// NodeGetInfo returns the node's name, its topology, and how many volumes it can have.
func (s *Server) NodeGetInfo(ctx context.Context, _ *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	segments := map[string]string{}
	maps.Copy(segments, s.Topology)
	if s.MoreTopology != nil {
		more, err := s.MoreTopology(ctx)
		if err != nil {
			return nil, fmt.Errorf("the topology of this node: %w", err)
		}
		maps.Copy(segments, more)
	}
	resp := &csi.NodeGetInfoResponse{NodeId: s.NodeID, MaxVolumesPerNode: s.MaxVolumes}
	if len(segments) > 0 {
		resp.AccessibleTopology = &csi.Topology{Segments: segments}
	}
	return resp, nil
}

// capabilities are those that work with the backends there are. VOLUME_MOUNT_GROUP is never
// among them: ext4, xfs and btrfs take no group at mount.
func (s *Server) capabilities() []csi.NodeServiceCapability_RPC_Type {
	all := []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
	}
	if s.Expands {
		all = append(all, csi.NodeServiceCapability_RPC_EXPAND_VOLUME)
	}
	if s.Storage != nil {
		all = append(all, csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH)
	}
	return all
}

// NodeGetCapabilities lists the optional RPCs that work.
func (s *Server) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	resp := &csi.NodeGetCapabilitiesResponse{}
	for _, c := range s.capabilities() {
		resp.Capabilities = append(resp.Capabilities, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: c}},
		})
	}
	return resp, nil
}
