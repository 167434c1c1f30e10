package devicestest

import (
	"bytes"
	"slices"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

func (s *suite) marks(volume string, formatting bool, formatted string) {
	s.Helper()
	if d := s.find(volume); d.Formatting != formatting || d.Formatted != formatted {
		s.Fatalf("formatting %t, formatted %q; want %t, %q", d.Formatting, d.Formatted, formatting, formatted)
	}
}

func (s *suite) formatMark() {
	v := s.Create(s.T, "mark")
	s.attached(v, false)
	s.class(s.formatter().EndFormat(s.ctx, of(v), "ext4"), state.FailedPrecondition)
	s.marks(v, false, "")
	for range 2 {
		s.ok(s.formatter().BeginFormat(s.ctx, of(v)))
		s.marks(v, true, "")
	}
	s.b = s.Open(s.T)
	s.marks(v, true, "")
	for range 2 {
		s.ok(s.formatter().EndFormat(s.ctx, of(v), "ext4"))
		s.marks(v, false, "ext4")
	}
	if can[devices.Grower](s.b) {
		s.ok(s.grower().Grow(s.ctx, s.asked(v), 2*Size))
	}
	s.b = s.Open(s.T)
	s.marks(v, false, "ext4")
	s.class(s.formatter().BeginFormat(s.ctx, of(v)), state.FailedPrecondition)
	s.marks(v, false, "ext4")
	s.class(s.formatter().BeginFormat(s.ctx, of("unknown")), state.NotFound)
	s.class(s.formatter().BeginRaw(s.ctx, of("unknown")), state.NotFound)

	raw := s.Create(s.T, "raw")
	if d := s.find(raw); d.Raw || d.Fresh == s.Existing {
		s.Fatalf("new: %+v", d)
	}
	s.attached(raw, false)
	for range 2 {
		s.ok(s.formatter().BeginRaw(s.ctx, of(raw)))
		s.b = s.Open(s.T)
		if d := s.find(raw); !d.Raw || d.Fresh {
			s.Fatalf("shown raw: %+v", d)
		}
		s.class(s.formatter().BeginFormat(s.ctx, of(raw)), state.FailedPrecondition)
		s.marks(raw, false, "")
	}
	s.class(s.formatter().EndFormat(s.ctx, of("unknown"), "ext4"), state.NotFound)
}

func (s *suite) erase() {
	v := s.Create(s.T, "erase")
	d := s.attached(v, false)
	junk := bytes.Repeat([]byte("junk"), 1024)
	places := []int64{0, Size / 2, Size - int64(len(junk))}
	for _, offset := range places {
		s.Write(s.T, d, offset, junk)
	}
	s.ok(s.formatter().BeginFormat(s.ctx, of(v)))
	s.ok(s.eraser().Erase(s.ctx, of(v)))
	got := make([]byte, Size)
	s.Read(s.T, d, 0, got)
	if i := slices.IndexFunc(got, func(b byte) bool { return b != 0 }); i >= 0 {
		s.Errorf("byte %d is %#x after the erasure", i, got[i])
	}
	s.marks(v, true, "")
	s.Write(s.T, d, 0, junk) // it still takes writes
}

func (s *suite) eraseRefused() {
	v := s.Create(s.T, "erase-refused")
	d := s.attached(v, false)
	s.Write(s.T, d, 0, []byte("data"))
	s.class(s.eraser().Erase(s.ctx, of(v)), state.FailedPrecondition) // no mark
	s.ok(s.formatter().BeginFormat(s.ctx, of(v)))
	release := s.Hold(s.T, d)
	s.class(s.eraser().Erase(s.ctx, of(v)), state.Unavailable)
	release()
	s.attached(v, true)
	s.class(s.eraser().Erase(s.ctx, of(v)), state.FailedPrecondition)
	s.ok(s.b.Detach(s.ctx, of(v)))
	s.class(s.eraser().Erase(s.ctx, of(v)), state.FailedPrecondition)
	s.class(s.eraser().Erase(s.ctx, of("unknown")), state.NotFound)
	got := make([]byte, 4)
	s.Read(s.T, s.attached(v, true), 0, got)
	if string(got) != "data" {
		s.Errorf("read %q after refused erasures", got)
	}
}
