package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// CSI spec v1.13: "Size Limits", and the characters banned from a volume's name.
const maxNameBytes = 128

// CreateVolume makes a volume in this node's pool, or answers with the one of
// that name if it is as asked.
//
// AlreadyExists: it is not as asked. OutOfRange: no size in the range can be
// had. ResourceExhausted: there is no room, or the volume must be on other
// nodes; nothing is left behind.
func (s *Server) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, err := s.wanted(req)
	if err != nil {
		return nil, err
	}
	have, err := s.Pool.Get(ctx, want.ID)
	switch {
	case err == nil:
		return s.answer(have, s.compatible(have, want, req))
	case state.ClassOf(err) != state.NotFound:
		return nil, err
	case !s.reaches(req.GetAccessibilityRequirements()):
		return nil, state.Errorf(state.ResourceExhausted, "volume %s: it must be accessible from other nodes, and a volume of this pool is accessible from node %s alone", req.GetName(), s.NodeID)
	}
	have, err = s.Pool.Create(ctx, want)
	if state.ClassOf(err) == state.AlreadyExists {
		err = s.compatible(have, want, req) // a call of the same name came between
	}
	return s.answer(have, err)
}

// wanted checks the request and returns the volume that it asks for.
func (s *Server) wanted(req *csi.CreateVolumeRequest) (pool.Volume, error) {
	none, name := pool.Volume{}, req.GetName()
	switch {
	case name == "":
		return none, state.Errorf(state.InvalidArgument, "name is missing")
	case len(name) > maxNameBytes || !utf8.ValidString(name) || strings.ContainsFunc(name, banned):
		return none, state.Errorf(state.InvalidArgument, "name %.200q: must have at most %d bytes, be UTF-8, and hold no control characters", name, maxNameBytes)
	case len(req.GetVolumeCapabilities()) == 0:
		return none, state.Errorf(state.InvalidArgument, "volume %s: volume_capabilities is missing", name)
	case req.GetVolumeContentSource() != nil:
		return none, state.Errorf(state.InvalidArgument, "volume %s: volume_content_source: this driver makes empty volumes only, neither from snapshots nor from volumes", name)
	case len(req.GetMutableParameters()) > 0:
		return none, state.Errorf(state.InvalidArgument, "volume %s: mutable_parameters: this driver has none", name)
	}
	// Growing while mounted is worth more than being as small as was asked: a type
	// that can is the default if the limit lets it fit.
	room := cmp.Or(req.GetCapacityRange().GetLimitBytes(), largestSize)
	fsType, err := s.fsTypeOf(req.GetVolumeCapabilities(), s.Filesystems.Default(room)) // the node service chooses likewise
	if err != nil {
		return none, fmt.Errorf("volume %s: %w", name, err)
	}
	v, err := parse(req.GetParameters())
	if err != nil {
		return none, fmt.Errorf("volume %s: %w", name, err)
	}
	bytes, err := sizeOf(req.GetCapacityRange(), fsType, s.smallest(fsType))
	if err != nil {
		return none, fmt.Errorf("volume %s: %w", name, err)
	}
	v.ID, v.Name, v.Bytes, v.FSType = pool.ID(name), name, bytes, fsType
	return v, nil
}

// banned reports the characters that the spec bans from names: control
// characters other than commonly used whitespace.
func banned(r rune) bool {
	return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r >= 0x7f && r <= 0x9f
}

// compatible returns AlreadyExists unless the volume that is there will do for
// the request. It may have grown since it was created.
func (s *Server) compatible(have, want pool.Volume, req *csi.CreateVolumeRequest) error {
	limit := req.GetCapacityRange().GetLimitBytes()
	fsType, err := s.fsTypeOf(req.GetVolumeCapabilities(), cmp.Or(have.FSType, want.FSType))
	other := differs(have, want, keys())
	switch {
	case err != nil:
		return err
	case have.Name != want.Name:
		return state.Errorf(state.AlreadyExists, "volume %s: its id %s is taken by the volume named %s", want.Name, have.ID, have.Name)
	case have.Bytes < req.GetCapacityRange().GetRequiredBytes(), limit > 0 && have.Bytes > limit:
		return state.Errorf(state.AlreadyExists, "volume %s: it exists with %d bytes, outside of the capacity_range", want.Name, have.Bytes)
	case other != "":
		return state.Errorf(state.AlreadyExists, "volume %s: it exists with %s", want.Name, other)
	case have.FSType != fsType:
		return state.Errorf(state.AlreadyExists, "volume %s: it exists as %s, not as %s", want.Name, use(have.FSType), use(fsType))
	case !s.reaches(req.GetAccessibilityRequirements()):
		return state.Errorf(state.AlreadyExists, "volume %s: it exists on node %s, which the accessibility_requirements do not name", want.Name, s.NodeID)
	}
	return nil
}

// use says what a volume with the fs type is for.
func use(fsType string) string {
	if fsType == "" {
		return "a block device"
	}
	return "a file system of type " + fsType
}

// answer makes the response, unless err is set.
func (s *Server) answer(v pool.Volume, err error) (*csi.CreateVolumeResponse, error) {
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: s.describe(v)}, nil
}
