package controllerserver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/state"
)

// modes are the access modes of a volume that only one node can reach.
var modes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
}

// complete returns InvalidArgument if a capability lacks a required field.
func complete(capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return state.Errorf(state.InvalidArgument, "volume_capabilities is missing")
	}
	for _, c := range capabilities {
		switch {
		case c.GetAccessMode() == nil || c.GetAccessMode().GetMode() == csi.VolumeCapability_AccessMode_UNKNOWN:
			return state.Errorf(state.InvalidArgument, "volume_capability.access_mode is missing or unknown")
		case c.GetBlock() == nil && c.GetMount() == nil:
			return state.Errorf(state.InvalidArgument, "volume_capability.access_type is missing")
		}
	}
	return nil
}

// fsTypeOf returns the file system type of a volume that has all the capabilities. An
// empty fs_type in one means the type unnamed. It returns an empty type for a block
// device. InvalidArgument says why there can be no such volume.
func (s *Server) fsTypeOf(capabilities []*csi.VolumeCapability, unnamed string) (string, error) {
	if err := complete(capabilities); err != nil {
		return "", err
	}
	fsType, asBlock, asMount := "", false, false
	for _, c := range capabilities {
		if mode := c.GetAccessMode().GetMode(); !slices.Contains(modes, mode) {
			return "", state.Errorf(state.InvalidArgument, "access mode %s: a volume of this driver is on one node and can be reached from that node alone; use a SINGLE_NODE mode (ReadWriteOnce, ReadWriteOncePod)", mode)
		}
		asBlock, asMount = asBlock || c.GetBlock() != nil, asMount || c.GetMount() != nil
		if asBlock && asMount {
			return "", state.Errorf(state.InvalidArgument, "access types block and mount: a volume is one or the other; what was used as a raw block device is never formatted")
		}
		if c.GetMount() == nil {
			continue
		}
		t, err := s.mountType(c.GetMount(), unnamed)
		switch {
		case err != nil:
			return "", err
		case fsType != "" && fsType != t:
			return "", state.Errorf(state.InvalidArgument, "fs_type %s and fs_type %s: a volume has one file system", fsType, t)
		}
		fsType = t
	}
	return fsType, nil
}

// mountType checks a mount capability and returns its file system type.
func (s *Server) mountType(m *csi.VolumeCapability_MountVolume, unnamed string) (string, error) {
	t, types := cmp.Or(m.GetFsType(), unnamed), s.Filesystems.Types()
	if !slices.Contains(types, t) {
		return "", state.Errorf(state.InvalidArgument, "fs_type %q is not one that this node can make (%s)", t, strings.Join(types, ", "))
	}
	if m.GetVolumeMountGroup() != "" {
		return "", state.Errorf(state.InvalidArgument, "volume_mount_group: %s takes no group at mount; leave it to fsGroupPolicy File", t)
	}
	_, err := state.ParseFlags(m.GetMountFlags())
	return t, err
}

// here reports whether volumes that are created here are accessible from the topology:
// this node is in each segment that it names.
func (s *Server) here(ctx context.Context, t *csi.Topology) (bool, error) {
	return s.inOneOf(ctx, []*csi.Topology{t})
}

// reaches reports whether a volume here meets the requirement: that names no
// requisite topology, or one that this node is in.
func (s *Server) reaches(ctx context.Context, r *csi.TopologyRequirement) (bool, error) {
	if len(r.GetRequisite()) == 0 {
		return true, nil
	}
	return s.inOneOf(ctx, r.GetRequisite())
}

// inOneOf reports whether this node is in one of the topologies. MoreTopology is asked at
// most once, and only if the engine's own segments leave it open.
func (s *Server) inOneOf(ctx context.Context, all []*csi.Topology) (bool, error) {
	known := func(own map[string]string) bool {
		return slices.ContainsFunc(all, func(t *csi.Topology) bool { return within(t, own) })
	}
	if len(s.Topology) == 0 || known(s.Topology) {
		return true, nil
	}
	if s.MoreTopology == nil || !slices.ContainsFunc(all, func(t *csi.Topology) bool { return agrees(t, s.Topology) }) {
		return false, nil
	}
	more, err := s.MoreTopology(ctx)
	if err != nil {
		return false, fmt.Errorf("the topology of this node: %w", err)
	}
	own := maps.Clone(s.Topology)
	maps.Copy(own, more)
	return known(own), nil
}

// within reports whether a node of the segments own is in the topology.
func within(t *csi.Topology, own map[string]string) bool {
	for key, value := range t.GetSegments() {
		if is, known := segment(own, key); !known || value != is {
			return false
		}
	}
	return true
}

// agrees reports whether a topology names no other value for a key of own.
func agrees(t *csi.Topology, own map[string]string) bool {
	for key, value := range t.GetSegments() {
		if is, known := segment(own, key); known && value != is {
			return false
		}
	}
	return true
}

// segment returns the value of a key. CSI spec v1.13: the keys of segments are
// case-insensitive.
func segment(own map[string]string, key string) (value string, known bool) {
	for name, is := range own {
		if strings.EqualFold(key, name) {
			return is, true
		}
	}
	return "", false
}
