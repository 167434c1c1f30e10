package devicestest

import (
	"slices"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// source: each volume is mounted from a source of its own, which is the same after a restart,
// and has no device. The source of a volume of which only the id is known is that one, or an
// error.
func (s *suite) source() {
	if !can[devices.MountSource](s.b) {
		s.Fatalf("Harness.Mounted is set, and %T is no devices.MountSource", s.b)
	}
	volumes := []string{s.Create(s.T, "source-a"), s.Create(s.T, "source-b")}
	places := map[string]string{}
	for range 2 {
		for _, v := range volumes {
			s.ok(s.b.Validate(s.asked(v)))
			if d, err := s.b.Find(s.ctx, of(v)); err != nil || d.State != state.DeviceAbsent || d.Missing || d.Err != nil {
				s.Errorf("Find of the volume %s, which is there and has no device: %+v (%v)", v, d, err)
			}
			place, err := s.placeOf(s.asked(v))
			s.ok(err)
			if places[v] == "" {
				places[v] = place
			}
			alone, err := s.placeOf(of(v))
			if places[v] != place || err == nil && alone != place {
				s.Errorf("volume %s is mounted from %q, before from %q, and by its id alone from %q", v, place, places[v], alone)
			}
			s.ok(s.b.Detach(s.ctx, of(v)))
		}
		s.b = s.Open(s.T)
	}
	if places[volumes[0]] == places[volumes[1]] {
		s.Errorf("two volumes are mounted from %q: by type and source the engine knows whose a mount is", places[volumes[0]])
	}
	unknown := of("unknown")
	s.ok(s.b.Validate(unknown))
	if d, err := s.b.Find(s.ctx, unknown); err != nil || d.State != state.DeviceAbsent {
		s.Errorf("unknown volume: %+v (%v)", d, err)
	}
	s.ok(s.b.Detach(s.ctx, unknown))
}

// placeOf returns the type and the source of what is mounted for a volume.
func (s *suite) placeOf(v devices.Volume) (string, error) {
	s.Helper()
	source, ok, err := s.b.(devices.MountSource).Source(s.ctx, v)
	if err != nil {
		return "", err
	}
	if !ok || source.FSType == "" || source.Source == "" || slices.Contains(source.Options, "bind") {
		s.Errorf("Source of the volume %s: %+v (%t): it names a type of the kernel and a source, and is no bind mount", v, source, ok)
	}
	return source.FSType + " " + source.Source, nil
}
