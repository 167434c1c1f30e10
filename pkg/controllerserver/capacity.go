package controllerserver

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	sizeUnit    = 4096    // sizes are multiples of it, in bytes
	defaultSize = 1 << 30 // bytes, when the CO names none
	largestSize = 1 << 62 // bytes; no file is larger, and sums do not overflow
)

// GetCapacity returns the bytes that new volumes with these parameters can
// have: what is free and not promised, times their overcommit. It is none for
// other nodes, for capabilities that no volume here has, and when the smallest
// volume has no room.
//
// Parameters that are no good count as none. Where GetCapacity refused them, the
// Kubernetes scheduler would call the node full, for ever, and nobody would come to
// CreateVolume, whose refusal says in the claim's events what is wrong with its class.
func (s *Server) GetCapacity(ctx context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	v, err := parse(req.GetParameters())
	if err != nil {
		v, _ = parse(nil)
	}
	if !s.here(req.GetAccessibleTopology()) {
		return &csi.GetCapacityResponse{}, nil
	}
	fsType := ""
	if len(req.GetVolumeCapabilities()) > 0 {
		if err := complete(req.GetVolumeCapabilities()); err != nil {
			return nil, err
		}
		if fsType, err = s.fsTypeOf(req.GetVolumeCapabilities(), s.Filesystems.Default(largestSize)); err != nil {
			return &csi.GetCapacityResponse{}, nil // the caller asks how much there is: none
		}
	}
	capacity, err := s.Pool.Capacity(ctx)
	if err != nil {
		return nil, err
	}
	room := capacity.Room(v.OvercommitPercent) / sizeUnit * sizeUnit
	if room < s.smallest(fsType) {
		room = 0
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: room,
		MaximumVolumeSize: wrapperspb.Int64(min(room, capacity.Largest, largestSize)),
		MinimumVolumeSize: wrapperspb.Int64(s.smallest(fsType)),
	}, nil
}

// smallest returns the bytes that a volume for the fs type has at least.
func (s *Server) smallest(fsType string) int64 {
	return max(s.Filesystems.Smallest(fsType), sizeUnit)
}

// sizeOf returns the size in bytes of a volume that meets the range: the least
// that the range requires, rounded up, and no less than smallest; without a
// requirement, the default.
func sizeOf(r *csi.CapacityRange, fsType string, smallest int64) (int64, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return 0, state.Errorf(state.InvalidArgument, "capacity_range holds a negative size")
	case limit > 0 && required > limit:
		return 0, state.Errorf(state.InvalidArgument, "capacity_range requires %d bytes and limits them to %d", required, limit)
	case limit > 0 && limit < smallest:
		return 0, state.Errorf(state.OutOfRange, "%s has at least %d bytes, more than the limit of %d", use(fsType), smallest, limit)
	case required > largestSize:
		return 0, state.Errorf(state.OutOfRange, "a volume cannot have %d bytes", required)
	}
	if required == 0 {
		required = defaultSize
		if limit > 0 {
			required = min(defaultSize, limit/sizeUnit*sizeUnit)
		}
	}
	bytes := max((required+sizeUnit-1)/sizeUnit*sizeUnit, smallest)
	if limit > 0 && bytes > limit {
		return 0, state.Errorf(state.OutOfRange, "sizes are multiples of %d bytes, and none lies between %d and %d", sizeUnit, required, limit)
	}
	return bytes, nil
}
