package devicestest

import (
	"bytes"
	"cmp"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// LayerHarness is what the suite needs of a layer.
type LayerHarness struct {
	Layer devices.Layer
	// Volume is one that wants the layer, as a CO tells of it: with its contexts,
	// and with its secrets if it has any. No other test has a volume of its id.
	Volume devices.Volume
	// WrongSecrets do not open the layer; nil: it needs none.
	WrongSecrets map[string]string
	// Size is how many bytes the element beneath has; 0: Size.
	Size int64
}

// Layer runs the suite for layers, each test with a harness of its own, on loop
// devices of the real kernel.
func Layer(t *testing.T, fresh func(t *testing.T) LayerHarness) {
	for name, test := range map[string]func(*layerSuite){
		"Nothing":  (*layerSuite).nothing,
		"Life":     (*layerSuite).life,
		"ReadOnly": (*layerSuite).readOnly,
		"Erase":    (*layerSuite).erase,
		"Grow":     (*layerSuite).grow,
		"Held":     (*layerSuite).held,
		"Stray":    (*layerSuite).stray,
		"Secret":   (*layerSuite).secret,
	} {
		t.Run(name, func(t *testing.T) {
			s := &layerSuite{checks: checks{t}, LayerHarness: fresh(t), ctx: t.Context()}
			s.Size = cmp.Or(s.Size, Size)
			s.lower = s.attach("lower")
			t.Cleanup(func() {
				if err := s.Layer.Close(context.WithoutCancel(s.ctx), state.Device{State: state.DeviceAbsent}, of(s.Volume.ID)); err != nil {
					t.Error(err)
				}
			})
			test(s)
		})
	}
}

type layerSuite struct {
	checks
	LayerHarness
	ctx   context.Context
	lower state.Device
}

// attach makes a loop device over a blank file.
func (s *layerSuite) attach(name string) state.Device {
	s.Helper()
	file := filepath.Join(s.TempDir(), name)
	s.ok(os.WriteFile(file, make([]byte, s.Size), 0o600))
	path := strings.TrimSpace(s.losetup("--find", "--show", file))
	s.Cleanup(func() { s.losetup("--detach", path) })
	if out, err := exec.Command("blockdev", "--setrw", path).CombinedOutput(); err != nil { // the mode outlives an earlier backing
		s.Fatalf("blockdev --setrw %s: %v: %s", path, err, out)
	}
	return s.look(state.Device{State: state.DeviceAttached, Path: path, Backing: file})
}

func (s *layerSuite) losetup(args ...string) string {
	s.Helper()
	out, err := exec.Command("losetup", args...).CombinedOutput()
	if err != nil {
		s.Fatalf("losetup %q: %v: %s", args, err, out)
	}
	return string(out)
}

// look completes a device by what its node says.
func (s *layerSuite) look(d state.Device) state.Device {
	s.Helper()
	var err error
	d.Number, _ = devnode.NumberAt(d.Path)
	d.Size, err = sizeOf(d.Path)
	s.ok(err)
	return d
}

// find returns what there is of the layer, which must be as wanted.
func (s *layerSuite) find(lower state.Device, v devices.Volume, want state.DeviceState) state.Device {
	s.Helper()
	d, err := s.Layer.Find(s.ctx, lower, v)
	s.ok(err)
	if d.State != want {
		s.Fatalf("the layer is %s, want %s: %+v", d.State, want, d)
	}
	return d
}

// made makes the layer.
func (s *layerSuite) made() {
	s.Helper()
	s.ok(s.Layer.Create(s.ctx, s.lower, s.Volume))
	if d := s.find(s.lower, s.Volume, state.DeviceAbsent); d.Unmade || !d.Fresh || d.Capacity <= 0 || d.Capacity > s.lower.Size {
		s.Fatalf("made: %+v", d)
	}
}

// opened opens the layer.
func (s *layerSuite) opened(readOnly bool) state.Device {
	s.Helper()
	s.ok(s.Layer.Open(s.ctx, s.lower, s.Volume, readOnly))
	d := s.find(s.lower, s.Volume, state.DeviceAttached)
	if d.ReadOnly != readOnly || d.Unmade || d.Stray || d.Path == "" || d.Number == (state.DeviceNumber{}) || d.Number == s.lower.Number || d.Size != d.Capacity {
		s.Fatalf("opened, read-only %t: %+v", readOnly, d)
	}
	return d
}

// closed closes a layer of which only the id is known.
func (s *layerSuite) closed(lower state.Device) {
	s.Helper()
	for range 2 {
		s.ok(s.Layer.Close(s.ctx, lower, of(s.Volume.ID)))
		s.find(lower, of(s.Volume.ID), state.DeviceAbsent)
	}
}

func (s *layerSuite) write(d state.Device, data []byte) {
	s.Helper()
	write(s.T, d, d.Size/2, data)
}

func (s *layerSuite) wantData(d state.Device, want []byte) {
	s.Helper()
	got := make([]byte, len(want))
	read(s.T, d, d.Size/2, got)
	if !bytes.Equal(got, want) {
		s.Fatalf("read %q, want %q", got, want)
	}
}

var absent = state.Device{State: state.DeviceAbsent}

func (s *layerSuite) nothing() {
	if s.Layer.Name() == "" || !s.Layer.Wanted(s.Volume) || s.Layer.Wanted(of(s.Volume.ID)) {
		s.Errorf("the layer %q is wanted %t, by an id %t", s.Layer.Name(), s.Layer.Wanted(s.Volume), s.Layer.Wanted(of(s.Volume.ID)))
	}
	for _, v := range []devices.Volume{s.Volume, of(s.Volume.ID)} {
		if d := s.find(absent, v, state.DeviceAbsent); d.Unmade || d.Fresh || d.Stray {
			s.Errorf("on nothing: %+v", d)
		}
		if d := s.find(s.lower, v, state.DeviceAbsent); s.Layer.Wanted(v) && !d.Unmade || d.Fresh || d.Stray {
			s.Errorf("on a blank device: %+v", d)
		}
	}
	s.closed(absent)
	s.closed(s.lower)
}

func (s *layerSuite) life() {
	s.made()
	s.made() // and does nothing
	d := s.opened(false)
	if again := s.opened(false); again != d {
		s.Errorf("opened again: %+v, before %+v", again, d)
	}
	if byID := s.find(s.lower, of(s.Volume.ID), state.DeviceAttached); byID.Number != d.Number || byID.Fresh != d.Fresh {
		s.Errorf("by the id alone: %+v", byID)
	}
	for range 2 {
		s.ok(s.Layer.Used(s.ctx, s.lower, s.Volume))
		if d := s.find(s.lower, s.Volume, state.DeviceAttached); d.Fresh || d.Unmade {
			s.Errorf("used: %+v", d)
		}
	}
	data := []byte("kept")
	s.write(d, data)
	s.class(s.Layer.Erase(s.ctx, s.lower, s.Volume), state.FailedPrecondition)
	s.closed(s.lower)
	if d := s.find(s.lower, s.Volume, state.DeviceAbsent); d.Fresh || d.Unmade {
		s.Errorf("closed: %+v", d)
	}
	s.wantData(s.opened(false), data)
}

func (s *layerSuite) readOnly() {
	s.made()
	data := []byte("kept")
	s.write(s.opened(false), data)
	s.closed(s.lower)
	d := s.opened(true)
	s.wantData(d, data)
	f, err := os.OpenFile(d.Path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt(data, 0)
		f.Close()
	}
	if err == nil {
		s.Error("it takes writes")
	}
	s.closed(s.lower)
	s.opened(false)
}

func (s *layerSuite) erase() {
	s.made()
	d := s.opened(false)
	s.write(d, []byte("junk"))
	s.ok(s.Layer.Erase(s.ctx, s.lower, s.Volume))
	all := d
	all.Size = 0
	s.wantData(all, make([]byte, d.Size))
	if again := s.opened(false); again != d {
		s.Errorf("erased: %+v, before %+v", again, d)
	}
}

func (s *layerSuite) grow() {
	s.made()
	d := s.opened(false)
	s.write(d, []byte("kept"))
	s.ok(os.Truncate(s.lower.Backing, 2*s.Size))
	s.losetup("--set-capacity", s.lower.Path)
	s.lower = s.look(s.lower)
	before := s.find(s.lower, s.Volume, state.DeviceAttached)
	if before.Capacity <= d.Capacity {
		s.Fatalf("on a device that has grown: %+v, before %+v", before, d)
	}
	for range 2 {
		s.ok(s.Layer.Grow(s.ctx, s.lower, s.Volume))
		if after := s.find(s.lower, s.Volume, state.DeviceAttached); after.Size != before.Capacity || after.Capacity != before.Capacity || after.Number != d.Number {
			s.Errorf("grown: %+v", after)
		}
	}
	s.wantData(d, []byte("kept"))
}

func (s *layerSuite) held() {
	s.made()
	d := s.opened(false)
	release := Hold(s.T, d.Path)
	s.class(s.Layer.Close(s.ctx, s.lower, s.Volume), state.Unavailable)
	if after := s.find(s.lower, s.Volume, state.DeviceAttached); after != d {
		s.Errorf("after the refusal: %+v, before %+v", after, d)
	}
	release()
	s.closed(s.lower)
}

// stray opens the layer on a device that is then not the volume's any more.
func (s *layerSuite) stray() {
	s.made()
	other := s.attach("other")
	for _, now := range []state.Device{absent, other} {
		d := s.opened(false)
		stray := s.find(now, s.Volume, state.DeviceForeign)
		if !stray.Stray || stray.Unmade || stray.Number != d.Number || stray.Holder == "" {
			s.Errorf("on another device: %+v", stray)
		}
		s.closed(now)
		s.find(s.lower, s.Volume, state.DeviceAbsent)
	}
	if d := s.find(other, s.Volume, state.DeviceAbsent); !d.Unmade {
		s.Errorf("the other device bears the layer: %+v", d)
	}
}

func (s *layerSuite) secret() {
	if s.WrongSecrets == nil {
		s.Skip("the layer needs no secret")
	}
	s.made()
	without, wrong := s.Volume, s.Volume
	without.Secrets, wrong.Secrets = devices.Secrets{}, devices.NewSecrets(s.WrongSecrets)
	if d := s.find(s.lower, without, state.DeviceAbsent); !d.NeedsSecret || d.Unmade {
		s.Errorf("without a secret: %+v", d)
	}
	if d := s.find(s.lower, s.Volume, state.DeviceAbsent); d.NeedsSecret {
		s.Errorf("with its secret: %+v", d)
	}
	for _, v := range []devices.Volume{without, wrong} {
		s.class(s.Layer.Open(s.ctx, s.lower, v, false), state.Unauthenticated)
		s.find(s.lower, v, state.DeviceAbsent)
	}
	s.opened(false)
	s.ok(s.Layer.Close(s.ctx, s.lower, without)) // an end needs none
}
