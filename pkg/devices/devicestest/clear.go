package devicestest

import (
	"bytes"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// clear empties a volume that was formatted, and refuses one that is in use.
func (s *suite) clear() {
	c := s.b.(devices.Clearer)
	v := s.Create(s.T, "clear")
	d := s.attached(v, false)
	s.ok(s.formatter().BeginFormat(s.ctx, of(v)))
	s.ok(s.formatter().EndFormat(s.ctx, of(v), "ext4"))
	junk := bytes.Repeat([]byte("junk"), Size/4)
	s.Write(s.T, d, 0, junk)
	s.class(c.Unused(s.ctx, of(v)), state.FailedPrecondition)
	s.class(c.Clear(s.ctx, of(v)), state.FailedPrecondition)
	s.marks(v, false, "ext4")
	got := make([]byte, Size)
	s.Read(s.T, d, 0, got)
	if !bytes.Equal(got, junk) {
		s.Fatal("a refused Clear has changed the bytes")
	}

	s.ok(s.b.Detach(s.ctx, of(v)))
	s.ok(c.Unused(s.ctx, of(v)))
	for range 2 {
		s.ok(c.Clear(s.ctx, of(v)))
		s.marks(v, false, "")
	}
	s.b = s.Open(s.T)
	s.marks(v, false, "")
	s.Read(s.T, s.attached(v, false), 0, got)
	if !bytes.Equal(got, make([]byte, Size)) {
		s.Error("not every byte is zero")
	}
	s.ok(s.formatter().BeginFormat(s.ctx, of(v))) // as a new volume

	s.class(c.Unused(s.ctx, of("unknown")), state.NotFound)
	s.class(c.Clear(s.ctx, of("unknown")), state.NotFound)
	s.class(c.Clear(s.ctx, of(s.badIDs()[1])), state.InvalidArgument)
}
