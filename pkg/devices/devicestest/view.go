package devicestest

import (
	"github.com/csi-node/csi-node/pkg/state"
)

func (s *suite) wantView(d state.Device, want state.DeviceState) state.Device {
	s.Helper()
	view, err := s.Views().FindView(s.ctx, d)
	s.ok(err)
	view = s.held(view)
	if view.State != want {
		s.Fatalf("the view is %s, want %s: %+v", view.State, want, view)
	}
	return view
}

func (s *suite) view() {
	v := s.Create(s.T, "view")
	d := s.attached(v, false)
	s.wantView(d, state.DeviceAbsent)
	s.ok(s.Views().DetachView(s.ctx, d))
	s.Write(s.T, d, 8192, []byte("seen"))

	s.ok(s.Views().AttachView(s.ctx, d))
	view := s.wantView(d, state.DeviceAttached)
	if !view.ReadOnly || view.Held || view.Number == d.Number || view.Size != Size {
		s.Errorf("the view of %s: %+v", d.Path, view)
	}
	got := make([]byte, 4)
	s.Read(s.T, view, 8192, got)
	if string(got) != "seen" {
		s.Errorf("read %q through the view", got)
	}
	s.ok(s.Views().AttachView(s.ctx, d))
	if again := s.wantView(d, state.DeviceAttached); again != view {
		s.Errorf("attached again: %+v, before %+v", again, view)
	}

	s.class(s.b.Detach(s.ctx, of(v)), state.Unavailable)
	s.want(v, state.DeviceAttached)
	release := s.Hold(s.T, view)
	s.class(s.Views().DetachView(s.ctx, d), state.Unavailable)
	if view := s.wantView(d, state.DeviceAttached); !view.Held {
		s.Errorf("the view is held and does not say so: %+v", view)
	}
	release()
	for range 2 {
		s.ok(s.Views().DetachView(s.ctx, d))
		s.wantView(d, state.DeviceAbsent)
	}
	s.ok(s.b.Detach(s.ctx, of(v)))
}

func (s *suite) viewRestart() {
	d := s.attached(s.Create(s.T, "view-restart"), false)
	s.ok(s.Views().AttachView(s.ctx, d))
	before := s.wantView(d, state.DeviceAttached)
	s.b = s.Open(s.T)
	if view := s.wantView(d, state.DeviceAttached); view != before {
		s.Errorf("after a restart: %+v, before %+v", view, before)
	}
	s.ok(s.Views().DetachView(s.ctx, d))
	s.wantView(d, state.DeviceAbsent)
}

// viewGrows: the device of a volume grows beneath a view, which the engine lets grow after it.
func (s *suite) viewGrows() {
	v := s.Create(s.T, "view-grows")
	d := s.attached(v, false)
	s.ok(s.Views().AttachView(s.ctx, d))
	s.ok(s.grower().Grow(s.ctx, s.asked(v), 2*Size))
	d = s.want(v, state.DeviceAttached)
	s.ok(s.Views().AttachView(s.ctx, d)) // as the engine does
	if view := s.wantView(d, state.DeviceAttached); view.Size != 2*Size {
		s.Errorf("the view has %d bytes, its device %d", view.Size, 2*Size)
	}
}
