package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// CSI spec v1.13: "Size Limits", and the characters banned from a volume's name.
const maxNameBytes = 128

// CreateVolume creates a volume with the backend that the parameters name, or answers
// with the existing one of that name if it meets the request.
//
// AlreadyExists: the existing one does not. OutOfRange: no size in the range is
// possible. ResourceExhausted: there is no room, or the volume must be on other
// nodes; nothing is left behind.
func (s *Server) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if err := s.provisions("CreateVolume"); err != nil {
		return nil, err
	}
	c, want, err := s.wanted(req)
	if err != nil {
		return nil, err
	}
	var have devices.Provisioned
	reaches, err := s.reaches(ctx, req.GetAccessibilityRequirements())
	if err != nil {
		return nil, fmt.Errorf("volume %s: %w", want.Name, err)
	}
	if reaches {
		have, err = c.CreateVolume(ctx, want)
	} else {
		have, err = s.elsewhere(ctx, c, want.Name)
	}
	if err != nil {
		return nil, err
	}
	if have.ID == "" {
		return nil, state.Errorf(state.Internal, "volume %s: the backend %s returned it without an id", want.Name, c.backend)
	}
	if have.Name != want.Name {
		return nil, state.Errorf(state.AlreadyExists, "volume %s: its id %s is taken by %s", want.Name, have.ID, s.owner(ctx, c, have))
	}
	if err := s.compatible(have, want, req, reaches); err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: s.describe(c.backend, have)}, nil
}

// elsewhere answers for a volume that must be accessible from other nodes. It is not
// created here, but may exist here already. This looks at all volumes, which does not
// matter: external-provisioner with --node-deployment never asks for that.
func (s *Server) elsewhere(ctx context.Context, c class, name string) (devices.Provisioned, error) {
	ids, err := c.ListVolumes(ctx)
	if err != nil {
		return devices.Provisioned{}, err
	}
	for _, id := range ids {
		if v, err := c.GetVolume(ctx, devices.Volume{ID: id, Backend: c.backend}); err == nil && v.Name == name {
			return v, nil
		}
	}
	return devices.Provisioned{}, state.Errorf(state.ResourceExhausted, "volume %s: it must be accessible from other nodes, and a volume made here is accessible from node %s alone", name, s.NodeID)
}

// wanted checks the request and returns what it asks of the backend.
func (s *Server) wanted(req *csi.CreateVolumeRequest) (c class, want devices.CreateRequest, err error) {
	name := req.GetName()
	switch {
	case name == "":
		return c, want, state.Errorf(state.InvalidArgument, "name is missing")
	case len(name) > maxNameBytes || !utf8.ValidString(name) || strings.ContainsFunc(name, banned):
		return c, want, state.Errorf(state.InvalidArgument, "name %.200q: must have at most %d bytes, be UTF-8, and hold no control characters", name, maxNameBytes)
	case len(req.GetVolumeCapabilities()) == 0:
		return c, want, state.Errorf(state.InvalidArgument, "volume %s: volume_capabilities is missing", name)
	case req.GetVolumeContentSource() != nil:
		return c, want, state.Errorf(state.InvalidArgument, "volume %s: volume_content_source: this driver creates only empty volumes, not copies of snapshots or volumes", name)
	case len(req.GetMutableParameters()) > 0:
		return c, want, state.Errorf(state.InvalidArgument, "volume %s: mutable_parameters: this driver has none", name)
	}
	// The default is a type that can grow while mounted, if the limit leaves room for
	// it, even if the volume must then be larger than required.
	room := cmp.Or(req.GetCapacityRange().GetLimitBytes(), devices.LargestBytes)
	fsType, err := s.fsTypeOf(req.GetVolumeCapabilities(), s.Filesystems.Default(room)) // the node service chooses likewise
	if err != nil {
		return c, want, fmt.Errorf("volume %s: %w", name, err)
	}
	if c, err = s.class(req.GetParameters()); err != nil {
		return c, want, fmt.Errorf("volume %s: %w", name, err)
	}
	if _, mounts := s.Backends.Get(c.backend).(devices.MountSource); !mounts && neverWritten(req.GetVolumeCapabilities()) {
		return c, want, state.Errorf(state.InvalidArgument, "volume %s: mount flag \"ro\": a new volume is blank, and is formatted when it is first mounted for writing: leave it out, and let pods mount it read-only", name)
	}
	want = devices.CreateRequest{Name: name, Parameters: c.parameters, Use: useOf(fsType), Secrets: devices.NewSecrets(req.GetSecrets()), Layers: c.layers}
	if want.Size, err = s.sizeOf(req.GetCapacityRange(), want.Use); err != nil {
		return c, want, fmt.Errorf("volume %s: %w", name, err)
	}
	want.Size = larger(want.Size, s.Backends.Overhead(c.layers))
	return c, want, nil
}

// neverWritten reports whether the volume would be mounted by all capabilities for reading only.
// Their flags are valid.
func neverWritten(capabilities []*csi.VolumeCapability) bool {
	return !slices.ContainsFunc(capabilities, func(c *csi.VolumeCapability) bool {
		flags, _ := state.ParseFlags(c.GetMount().GetMountFlags())
		return flags.Set&state.ReadOnly == 0
	})
}

// larger returns the range for a volume of which layers take so many bytes.
func larger(r devices.SizeRange, overhead int64) devices.SizeRange {
	if overhead == 0 {
		return r
	}
	if r.Required == 0 && (r.Limit == 0 || r.Limit >= devices.DefaultBytes) {
		r.Required = devices.DefaultBytes
	}
	if r.Required > 0 {
		r.Required = min(r.Required+overhead, devices.LargestBytes)
	}
	if r.Limit > 0 {
		r.Limit = min(r.Limit+overhead, devices.LargestBytes)
	}
	r.Smallest += overhead
	return r
}

// banned reports the characters that the spec bans from names: control
// characters other than commonly used whitespace.
func banned(r rune) bool {
	return r < 0x20 && r != '\t' && r != '\n' && r != '\r' || r >= 0x7f && r <= 0x9f
}

// owner says which volume has an id. An inline one has no name.
func (s *Server) owner(ctx context.Context, c class, have devices.Provisioned) string {
	if have.Name != "" {
		return "the volume named " + have.Name
	}
	if in, can := s.Backends.Get(c.backend).(devices.Inliner); can {
		if owner, err := in.InlineOwner(ctx, have.ID); err == nil && owner != nil {
			return "an inline volume, of the pod at " + owner.Target
		}
	}
	return "a volume that no CreateVolume has made"
}

// compatible returns AlreadyExists unless the existing volume meets the request. It
// may have grown since it was created.
func (s *Server) compatible(have devices.Provisioned, want devices.CreateRequest, req *csi.CreateVolumeRequest, reaches bool) error {
	fsType, err := s.fsTypeOf(req.GetVolumeCapabilities(), cmp.Or(have.Use.FSType, want.Use.FSType))
	other := differs(have.Parameters, want.Parameters, func(string) bool { return true })
	if layers, _ := s.Backends.LayerContext(have.Context); other == "" { // those that it has were valid once
		other = differs(notNil(layers), want.Layers, func(string) bool { return true })
	}
	own, size := have.Bytes-s.Backends.Overhead(have.Context), req.GetCapacityRange()
	switch {
	case err != nil:
		return err
	case other != "":
		return state.Errorf(state.AlreadyExists, "volume %s: it exists with %s", want.Name, other)
	case own < size.GetRequiredBytes(), size.GetLimitBytes() > 0 && own > size.GetLimitBytes():
		return state.Errorf(state.AlreadyExists, "volume %s: it exists with %d bytes, outside of the capacity_range", want.Name, own)
	case have.Use != (devices.Use{}) && have.Use != useOf(fsType):
		return state.Errorf(state.AlreadyExists, "volume %s: it exists as %s, not as %s", want.Name, have.Use, useOf(fsType))
	case !reaches:
		return state.Errorf(state.AlreadyExists, "volume %s: it exists on node %s, which the accessibility_requirements do not name", want.Name, s.NodeID)
	}
	return nil
}

func notNil(m map[string]string) map[string]string {
	if m == nil {
		return map[string]string{}
	}
	return m
}

// useOf returns the use of a volume with the fs type; an empty one is a block device.
func useOf(fsType string) devices.Use {
	return devices.Use{Block: fsType == "", FSType: fsType}
}
