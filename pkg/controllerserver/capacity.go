package controllerserver

import (
	"cmp"
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// smallestSize bounds the size of every volume, in bytes: no file system and no
// device is smaller.
const smallestSize = 4096

// GetCapacity returns the bytes that new volumes with these parameters can have. That
// is 0 for other nodes, for capabilities that no volume here can have, and when there
// is no room for the smallest volume.
//
// Invalid parameters are treated as if there were none. If GetCapacity refused them,
// the Kubernetes scheduler would consider the node full for ever. CreateVolume would
// never be called, and its error, which shows in the claim's events what is wrong with
// the StorageClass, would never be seen.
func (s *Server) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if err := s.provisions("GetCapacity"); err != nil {
		return nil, err
	}
	c, err := s.class(req.GetParameters())
	if err != nil {
		if c, err = s.anyClass(); err != nil {
			return nil, err
		}
	}
	if here, err := s.here(ctx, req.GetAccessibleTopology()); err != nil {
		return nil, err
	} else if !here {
		return &csi.GetCapacityResponse{}, nil
	}
	fsType := ""
	if len(req.GetVolumeCapabilities()) > 0 {
		if err := complete(req.GetVolumeCapabilities()); err != nil {
			return nil, err
		}
		if fsType, err = s.fsTypeOf(req.GetVolumeCapabilities(), s.Filesystems.Default(devices.LargestBytes)); err != nil {
			return &csi.GetCapacityResponse{}, nil // there is no capacity for such volumes
		}
	}
	capacity, err := c.GetCapacity(ctx, c.parameters)
	if err != nil {
		return nil, err
	}
	overhead := s.Backends.Overhead(c.layers)
	room, smallest := capacity.Available-overhead, max(s.smallest(fsType), capacity.Smallest-overhead)
	if room < smallest {
		room = 0
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: room,
		MaximumVolumeSize: wrapperspb.Int64(max(0, min(room, cmp.Or(capacity.Largest, devices.LargestBytes)-overhead, devices.LargestBytes))),
		MinimumVolumeSize: wrapperspb.Int64(smallest),
	}, nil
}

// smallest returns the least bytes that a volume for the fs type can have.
func (s *Server) smallest(fsType string) int64 {
	return max(s.Filesystems.Smallest(fsType), smallestSize)
}

// sizeOf returns the range that the size of a volume for the use must be in.
// InvalidArgument, OutOfRange: there is no such size.
func (s *Server) sizeOf(r *csi.CapacityRange, use devices.Use) (devices.SizeRange, error) {
	required, limit, smallest := r.GetRequiredBytes(), r.GetLimitBytes(), s.smallest(use.FSType)
	switch {
	case required < 0 || limit < 0:
		return devices.SizeRange{}, state.Errorf(state.InvalidArgument, "capacity_range holds a negative size")
	case limit > 0 && required > limit:
		return devices.SizeRange{}, state.Errorf(state.InvalidArgument, "capacity_range requires %d bytes and limits them to %d", required, limit)
	case limit > 0 && limit < smallest:
		return devices.SizeRange{}, state.Errorf(state.OutOfRange, "%s has at least %d bytes, more than the limit of %d", use, smallest, limit)
	case required > devices.LargestBytes:
		return devices.SizeRange{}, state.Errorf(state.OutOfRange, "a volume cannot have %d bytes", required)
	}
	return devices.SizeRange{Required: required, Limit: min(limit, devices.LargestBytes), Smallest: smallest}, nil
}
