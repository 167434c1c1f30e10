package devicestest

import (
	"crypto/rand"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// noise returns bytes that nothing else holds.
func noise(bytes int) []byte {
	data := make([]byte, bytes)
	_, _ = rand.Read(data) // never fails
	return data
}

// fill writes noise to all of a device, in parts.
func (s *suite) fill(devices ...state.Device) (data [][]byte) {
	const part = Size / 4
	for _, d := range devices {
		data = append(data, noise(int(d.Size)))
	}
	for at, more := 0, true; more; at += part { // in turns: of bytes that two have, none is right for both
		more = false
		for i, d := range devices {
			if at < len(data[i]) {
				s.Write(s.T, d, int64(at), data[i][at:min(at+part, len(data[i]))])
				more = true
			}
		}
	}
	return data
}

// holds sees which bytes a device has, from an offset on.
func (s *suite) holds(volume string, d state.Device, offset int64, want []byte, why string) {
	s.Helper()
	got := make([]byte, len(want))
	s.Read(s.T, d, offset, got)
	for i := range got {
		if got[i] != want[i] {
			s.Fatalf("byte %d of volume %s is %#x and not %#x: %s", offset+int64(i), volume, got[i], want[i], why)
		}
	}
}

const (
	keepsOwn = "it must be what was written to this volume last, and no other volume's"
	isEmpty  = "it must be empty, whatever its storage held"
)

// apart: each of two volumes that are written at the same time has bytes of its own.
func (s *suite) apart() {
	volumes := []string{s.Create(s.T, "apart-a"), s.Create(s.T, "apart-b")}
	found := []state.Device{s.attached(volumes[0], false), s.attached(volumes[1], false)}
	data := s.fill(found...)
	s.keep(volumes, found, data)
}

// keep sees that volumes have their data, as they are attached and when they are attached again.
func (s *suite) keep(volumes []string, found []state.Device, data [][]byte) {
	s.Helper()
	for i, v := range volumes {
		s.holds(v, found[i], 0, data[i], keepsOwn)
	}
	for _, v := range volumes {
		s.ok(s.b.Detach(s.ctx, of(v)))
	}
	s.b = s.Open(s.T)
	for _, i := range []int{1, 0} { // each may have the other's number now
		found[i] = s.attached(volumes[i], i == 0)
	}
	for i, v := range volumes {
		s.holds(v, found[i], 0, data[i], keepsOwn)
	}
}

// growApart: what a volume grows by is nobody else's, also where there is no room behind it.
func (s *suite) growApart() {
	volumes := []string{s.Create(s.T, "grow-apart-a"), s.Create(s.T, "grow-apart-b")}
	first, second := s.attached(volumes[0], false), s.attached(volumes[1], false)
	data := s.fill(first, second)
	s.ok(s.grower().Grow(s.ctx, s.asked(volumes[0]), 2*Size))
	first = s.want(volumes[0], state.DeviceAttached)
	s.size(first, 2*Size)
	s.holds(volumes[0], first, 0, data[0], keepsOwn)
	if !s.Existing {
		s.holds(volumes[0], first, Size, make([]byte, Size), "what a volume grows by reads as zeros")
	}
	var bytes int64 = 4 * Size
	if err := s.grower().Grow(s.ctx, s.asked(volumes[0]), bytes); err != nil {
		s.class(err, state.ResourceExhausted)
		bytes = 2 * Size
	}
	first = s.want(volumes[0], state.DeviceAttached)
	s.size(first, bytes)
	data[0] = s.fill(first)[0]
	s.keep(volumes, []state.Device{first, second}, data)
}

// growReused: a volume grows by what a deleted volume has left, and shows nothing of that.
func (s *suite) growReused() {
	p := s.provisioner()
	v := s.made(p, s.ask(p, "grow-reused-old", 4*Size))
	s.fill(s.attachedMade(v))
	s.ok(s.b.Detach(s.ctx, of(v.ID)))
	s.ok(p.DeleteVolume(s.ctx, of(v.ID)))

	v = s.made(p, s.ask(p, "grow-reused", Size))
	s.ok(s.grower().Grow(s.ctx, s.askedMade(v), 4*Size))
	d := s.attachedMade(v)
	s.holds(v.ID, d, 0, make([]byte, d.Size), isEmpty)
	s.ok(s.b.Detach(s.ctx, of(v.ID)))
	s.ok(p.DeleteVolume(s.ctx, of(v.ID)))
}

// askedMade is asked for a volume that the backend has made.
func (s *suite) askedMade(v devices.Provisioned) devices.Volume {
	spec := s.asked(v.ID)
	spec.Context = v.Context
	return spec
}

// attachedMade attaches a volume that the backend has made.
func (s *suite) attachedMade(v devices.Provisioned) state.Device {
	s.Helper()
	s.ok(s.b.Attach(s.ctx, s.askedMade(v), false))
	return s.want(v.ID, state.DeviceAttached)
}
