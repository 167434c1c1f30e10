package devicestest

import (
	"slices"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// source: each volume is mounted from a source of its own, which is the same after a restart,
// and has no device.
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
			place := s.place(s.asked(v))
			if before, known := places[v]; known && place != before {
				s.Errorf("volume %s is mounted from %q, and was before from %q", v, place, before)
			}
			places[v] = place
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

// place returns the type and the source of what is mounted for a volume: if only its id is
// known, it is the same, or an error.
func (s *suite) place(v devices.Volume) string {
	s.Helper()
	m := s.b.(devices.MountSource)
	source, ok, err := m.Source(s.ctx, v)
	s.ok(err)
	if !ok || source.FSType == "" || source.Source == "" || slices.Contains(source.Options, "bind") {
		s.Errorf("Source of the volume %s: %+v (%t): it names a type of the kernel and a source, and is no bind mount", v, source, ok)
	}
	if alone, ok, err := m.Source(s.ctx, of(v.ID)); err == nil && (!ok || alone.FSType != source.FSType || alone.Source != source.Source) {
		s.Errorf("volume %s is mounted from %+v, and by its id alone from %+v (%t)", v, source, alone, ok)
	}
	return source.FSType + " " + source.Source
}
