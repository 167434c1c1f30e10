package controllerserver

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// sealed is a layer that takes 20 MiB of its element.
type sealed struct{ devices.ClassLayer }

func (sealed) ContextKey() string           { return "seal" }
func (sealed) Overhead() int64              { return 20 * mib }
func (sealed) Wanted(v devices.Volume) bool { return v.Context["seal"] == "wax" }

func (sealed) Validate(v devices.Volume) error {
	if value, named := v.Context["seal"]; named && value != "wax" {
		return state.Errorf(state.InvalidArgument, "seal: %s: there is wax", value)
	}
	return nil
}

func withLayer() *Server {
	s, _ := withArray()
	s.Backends.KeepLayers([]devices.Layer{sealed{}})
	return s
}

// A volume with a layer has the bytes that were asked for above it, is told so
// everywhere, and is no volume without it.
func TestLayerOfAClass(t *testing.T) {
	for backend, unit := range map[string]int64{"pool": 4096, "array": extent} {
		s := withLayer()
		with, without := parameters("backend", backend, "seal", "wax"), parameters("backend", backend)
		above := func(asked int64) int64 { return (asked+20*mib+unit-1)/unit*unit - 20*mib }
		for range 2 {
			resp, err := s.CreateVolume(t.Context(), request(name("v"), size(gib, 2*gib), with))
			require.NoError(t, err)
			v := resp.GetVolume()
			if v.GetCapacityBytes() != above(gib) || v.GetVolumeContext()["seal"] != "wax" {
				t.Errorf("%s: answers %v", backend, v)
			}
			got, err := s.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: v.GetVolumeId()})
			if err != nil || got.GetVolume().GetCapacityBytes() != above(gib) {
				t.Errorf("%s: is %v (%v)", backend, got, err)
			}
			for i, p := range []change{with, without} {
				r := request(p)
				confirmed, err := s.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
					VolumeId: v.GetVolumeId(), VolumeContext: v.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(), Parameters: r.GetParameters(),
				})
				if err != nil || confirmed.GetConfirmed() == nil {
					t.Errorf("%s, %d: not confirmed: %v (%v)", backend, i, confirmed, err)
				}
			}
		}
		_, err := s.CreateVolume(t.Context(), request(name("v"), size(gib, 2*gib), without))
		check(t, err, state.AlreadyExists, "seal wax")
		_, err = s.CreateVolume(t.Context(), request(name("w"), size(gib, 2*gib), without))
		require.NoError(t, err)
		_, err = s.CreateVolume(t.Context(), request(name("w"), size(gib, 2*gib), with))
		check(t, err, state.AlreadyExists, "seal by default")
		_, err = s.CreateVolume(t.Context(), request(name("x"), parameters("backend", backend, "seal", "lead")))
		check(t, err, state.InvalidArgument, "there is wax")
		resp, err := s.CreateVolume(t.Context(), request(name("y"), size(0, 0), with))
		if err != nil || resp.GetVolume().GetCapacityBytes() != above(devices.DefaultBytes) {
			t.Errorf("%s: of no size: %v (%v)", backend, resp, err)
		}
		_, err = s.CreateVolume(t.Context(), request(name("small"), size(64*mib, 0), with))
		require.NoError(t, err)
		_, err = s.CreateVolume(t.Context(), request(name("small"), size(0, 0), with)) // no size is asked for
		require.NoError(t, err)
		_, err = s.CreateVolume(t.Context(), request(name("small"), size(gib, 0), with))
		check(t, err, state.AlreadyExists, "outside of the capacity_range")
		_, err = s.CreateVolume(t.Context(), request(name("small"), size(0, 32*mib), with))
		check(t, err, state.AlreadyExists, "outside of the capacity_range")
		for _, p := range []change{with, without} { // a backend gets no limit that a sum could overflow
			if _, want, err := s.wanted(request(size(gib, 1<<63-1), p)); err != nil || want.Size.Limit != devices.LargestBytes {
				t.Errorf("%s: wanted is %+v (%v)", backend, want.Size, err)
			}
		}
		plain, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"backend": backend}})
		require.NoError(t, err)
		capacity, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"backend": backend, "seal": "wax"}})
		require.NoError(t, err)
		if got := plain.GetAvailableCapacity() - capacity.GetAvailableCapacity(); got != 20*mib {
			t.Errorf("%s: there is room for %d bytes less", backend, got)
		}
		if got := capacity.GetMaximumVolumeSize().GetValue(); got > capacity.GetAvailableCapacity() || got > plain.GetMaximumVolumeSize().GetValue()-20*mib {
			t.Errorf("%s: one may have %d bytes, without the layer %d", backend, got, plain.GetMaximumVolumeSize().GetValue())
		}
		if backend != "array" {
			continue
		}
		full, err := s.GetCapacity(t.Context(), &csi.GetCapacityRequest{Parameters: map[string]string{"backend": backend, "tier": "full", "seal": "wax"}})
		if err != nil || full.GetAvailableCapacity() != 0 || full.GetMaximumVolumeSize().GetValue() != 0 {
			t.Errorf("%s: with less room than the layer takes: %v (%v)", backend, full, err)
		}
	}
}
