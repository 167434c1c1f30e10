// Package devicestest is the suite that every backend of package devices runs,
// on the real thing or on a fake. Begin with Harness and Backend, in this file; Layer has
// the suite of layers.
package devicestest

import (
	"context"
	"path/filepath"
	"sync"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// Size is that of the volumes that the suite asks for, in bytes.
const Size = 4 << 20

// Harness is what the suite needs of a backend. Each function fails the test
// if it cannot do its work, and the test's clean-up undoes all of it.
type Harness struct {
	// Open returns a backend over the same volumes each time, as after a
	// restart of the plugin. Which of the optional interfaces are tested, too,
	// docs/backends.md says.
	Open func(t *testing.T) devices.Backend
	// Mounted: no volume has a device, as all are mounted from a source
	// (devices.MountSource). Then Open and Create are enough.
	Mounted bool
	// Views returns what the engine keeps over the devices of the backend that was
	// opened last.
	Views func() Views
	// Create makes a writable volume of Size bytes and returns its id.
	Create func(t *testing.T, name string) string
	// Volume returns what a CO tells of a volume that is to be attached or grown: its
	// contexts and secrets, for backends that need them; nil: the id is enough, as it
	// always is to find and to detach one. The suite also names ids that are unknown or bad.
	Volume func(id string) devices.Volume
	// InlineAttributes ask an Inliner for a volume of a few MiB.
	InlineAttributes map[string]string
	// BadIDs are ids that no volume of the backend can have; nil: those that are
	// no name of a file.
	BadIDs []string
	// Existing: the volumes are made by others, so none is Fresh that was not cleared.
	Existing bool
	// Hold claims a device as a mount does, until release is called; nil: by its node.
	Hold func(t *testing.T, device state.Device) (release func())
	// Write and Read reach the bytes of a device; nil: by its node.
	Write func(t *testing.T, device state.Device, offset int64, data []byte)
	Read  func(t *testing.T, device state.Device, offset int64, data []byte)
}

// Views are the engine's read-only devices over those of a backend, and tell
// whether one is in use.
type Views interface {
	devices.Viewer
	devices.Holder
}

// Backend runs the suite, each test with a harness of its own. What a backend
// cannot do is not asked of it.
func Backend(t *testing.T, fresh func(t *testing.T) Harness) {
	h := fresh(t)
	b, ran := h.Open(t), false // here, as tests that are named run without others
	for _, group := range []struct {
		asked bool
		tests map[string]func(*suite)
	}{
		{true, map[string]func(*suite){
			"BadID": (*suite).badID,
		}},
		{h.Mounted, map[string]func(*suite){
			"Source": (*suite).source,
		}},
		{!h.Mounted, map[string]func(*suite){
			"Unknown":          (*suite).unknown,
			"Absent":           (*suite).absent,
			"Attach":           (*suite).attach,
			"AttachReadOnly":   (*suite).attachReadOnly,
			"OtherMode":        (*suite).otherMode,
			"OtherModeHeld":    (*suite).otherModeHeld,
			"Detach":           (*suite).detach,
			"DetachHeld":       (*suite).detachHeld,
			"Restart":          (*suite).restart,
			"AttachConcurrent": (*suite).attachConcurrent,
			"MixConcurrent":    (*suite).mixConcurrent,
			"Apart":            (*suite).apart,
			"EndedContext":     (*suite).endedContext,
			"View":             (*suite).view,
			"ViewRestart":      (*suite).viewRestart,
		}},
		{!h.Mounted && can[devices.Grower](b), map[string]func(*suite){
			"GrowAbsent":   (*suite).growAbsent,
			"GrowAttached": (*suite).growAttached,
			"GrowTooLarge": (*suite).growTooLarge,
			"GrowApart":    (*suite).growApart,
			"ViewGrows":    (*suite).viewGrows,
		}},
		{!h.Mounted && can[devices.Formatter](b), map[string]func(*suite){
			"FormatMark": (*suite).formatMark,
		}},
		{!h.Mounted && can[devices.Formatter](b) && can[devices.Eraser](b), map[string]func(*suite){
			"Erase":        (*suite).erase,
			"EraseRefused": (*suite).eraseRefused,
		}},
		{!h.Mounted && can[devices.Formatter](b) && can[devices.Clearer](b), map[string]func(*suite){
			"Clear": (*suite).clear,
		}},
		{can[devices.Provisioner](b), map[string]func(*suite){
			"Provision":           (*suite).provision,
			"ProvisionSizes":      (*suite).provisionSizes,
			"ProvisionNames":      (*suite).provisionNames,
			"ProvisionConcurrent": (*suite).provisionConcurrent,
			"ProvisionParameters": (*suite).provisionParameters,
			"ProvisionEnded":      (*suite).provisionEnded,
			"Capacity":            (*suite).capacity,
		}},
		{!h.Mounted && can[devices.Provisioner](b), map[string]func(*suite){
			"ProvisionAttached": (*suite).provisionAttached,
		}},
		{!h.Mounted && can[devices.Grower](b) && can[devices.Provisioner](b), map[string]func(*suite){
			"GrowReused": (*suite).growReused,
		}},
		{!h.Mounted && can[devices.Lister](b), map[string]func(*suite){
			"List": (*suite).list,
		}},
		{!h.Mounted && can[devices.Locator](b), map[string]func(*suite){
			"Locate": (*suite).locate,
		}},
		{can[devices.Meter](b), map[string]func(*suite){
			"Measure": (*suite).measure,
		}},
		{!h.Mounted && can[devices.Inliner](b), map[string]func(*suite){
			"Inline": (*suite).inline,
		}},
	} {
		for name, test := range group.tests {
			if !group.asked {
				continue
			}
			t.Run(name, func(t *testing.T) {
				ran = true
				h := fresh(t)
				nodes := h.Hold == nil && h.Write == nil && h.Read == nil
				test(&suite{checks: checks{t}, Harness: h.onNodes(), nodes: nodes, ctx: t.Context(), b: h.Open(t)})
			})
		}
	}
	if !ran {
		t.Error("none of the suite's tests ran: none has the name that was asked for, or the backend lacks what that tests")
	}
}

// can reports whether a backend has an optional interface.
func can[T any](b devices.Backend) bool {
	_, ok := b.(T)
	return ok
}

type suite struct {
	checks
	Harness
	nodes bool // its devices have nodes
	ctx   context.Context
	b     devices.Backend
}

// checks are what both suites require of an error.
type checks struct{ *testing.T }

func (s checks) ok(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

func (s checks) class(err error, want state.Class) {
	s.Helper()
	if err == nil || state.ClassOf(err) != want {
		s.Fatalf("error %v, want one of class %s", err, want)
	}
}

func (s *suite) find(volume string) state.Device {
	s.Helper()
	d, err := s.b.Find(s.ctx, of(volume))
	s.ok(err)
	return s.held(d)
}

// held completes what Find says by what Held says.
func (s *suite) held(d state.Device) state.Device {
	s.Helper()
	if d.Present() {
		var err error
		d.Held, err = s.Views().Held(s.ctx, d)
		s.ok(err)
	}
	return d
}

func (s *suite) want(volume string, want state.DeviceState) state.Device {
	s.Helper()
	d := s.find(volume)
	if d.State != want {
		s.Fatalf("volume %s is %s, want %s: %+v", volume, d.State, want, d)
	}
	return d
}

func (s *suite) attached(volume string, readOnly bool) state.Device {
	s.Helper()
	s.ok(s.b.Attach(s.ctx, s.asked(volume), readOnly))
	d := s.want(volume, state.DeviceAttached)
	if d.ReadOnly != readOnly || d.Missing || d.Held || d.Path == "" || d.Number == (state.DeviceNumber{}) {
		s.Fatalf("attached, read-only %t: %+v", readOnly, d)
	}
	if s.nodes {
		s.isNode(d)
	}
	return d
}

// isNode sees that the path of a device is the node of its number.
func (s *suite) isNode(d state.Device) {
	s.Helper()
	if number, is := devnode.NumberAt(d.Path); !is || !filepath.IsAbs(d.Path) || number != d.Number {
		s.Fatalf("the path %q is not that of the block device %s: it is absolute, and a node of that number", d.Path, d.Number)
	}
}

func (s *suite) size(d state.Device, want int64) {
	s.Helper()
	if d.Size != want || d.Capacity != 0 && d.Capacity != want {
		s.Fatalf("%d bytes of %d, want %d", d.Size, d.Capacity, want)
	}
}

func (s *suite) unknown() {
	if err := s.b.Validate(of("unknown")); err != nil {
		s.Fatalf("no volume has the id \"unknown\", and Validate must allow it all the same, as a CO asks for such ids: %v", err)
	}
	d := s.find("unknown")
	if d.State != state.DeviceAbsent || !d.Missing {
		s.Errorf("unknown volume: %+v", d)
	}
	s.class(s.b.Attach(s.ctx, s.asked("unknown"), false), state.NotFound)
	s.ok(s.b.Detach(s.ctx, of("unknown")))
	if can[devices.Grower](s.b) {
		s.class(s.grower().Grow(s.ctx, s.asked("unknown"), Size), state.NotFound)
	}
}

func (s *suite) badID() {
	for _, id := range s.badIDs() {
		_, err := s.b.Find(s.ctx, of(id))
		answers := map[string]error{
			"Validate": s.b.Validate(of(id)),
			"Find":     err,
			"Detach":   s.b.Detach(s.ctx, of(id)),
		}
		if !s.Mounted {
			answers["Attach"] = s.b.Attach(s.ctx, s.asked(id), false)
		}
		if !s.Mounted && can[devices.Grower](s.b) {
			answers["Grow"] = s.grower().Grow(s.ctx, s.asked(id), Size)
		}
		for method, err := range answers {
			if err == nil || state.ClassOf(err) != state.InvalidArgument {
				s.Errorf("%s of the id %q, which no volume can have: error %v, want one of class %s", method, id, err, state.InvalidArgument)
			}
		}
	}
}

func (s *suite) badIDs() []string {
	if s.BadIDs != nil {
		return s.BadIDs
	}
	return []string{"", "../etc", "a/b", "a\x00b"}
}

func (s *suite) absent() {
	v := s.Create(s.T, "absent")
	d := s.want(v, state.DeviceAbsent)
	s.size(d, Size)
	if d.Missing || d.Held || d.Path != "" || d.Number != (state.DeviceNumber{}) {
		s.Errorf("absent: %+v", d)
	}
	s.ok(s.b.Detach(s.ctx, of(v)))
}

func (s *suite) attach() {
	v := s.Create(s.T, "attach")
	first := s.attached(v, false)
	s.size(first, Size)
	if again := s.attached(v, false); again != first {
		s.Errorf("attached again: %+v, before %+v", again, first)
	}
	other := s.Create(s.T, "other")
	second := s.attached(other, false)
	if second.Number == first.Number {
		s.Errorf("two volumes have the device %s", second.Path)
	}
	if second.Path == first.Path {
		s.Errorf("two volumes have the node %s", second.Path)
	}
	if first.Identity != "" && second.Identity == first.Identity {
		s.Errorf("two volumes have the identity %q", first.Identity)
	}
	s.ok(s.b.Detach(s.ctx, of(v)))
	s.ok(s.b.Detach(s.ctx, of(other)))
	if d := s.attached(other, false); d.Identity != second.Identity { // it has the other's number now, if that is free again
		s.Errorf("the identity was %q and is %q when attached again", second.Identity, d.Identity)
	}
}

func (s *suite) attachReadOnly() {
	v := s.Create(s.T, "read-only")
	s.size(s.attached(v, true), Size)
}

func (s *suite) otherMode() {
	v := s.Create(s.T, "mode")
	s.attached(v, false)
	s.attached(v, true)
	d := s.attached(v, false)
	s.Write(s.T, d, 0, []byte("written"))
}

func (s *suite) otherModeHeld() {
	v := s.Create(s.T, "mode-held")
	before := s.attached(v, false)
	release := s.Hold(s.T, before)
	s.class(s.b.Attach(s.ctx, s.asked(v), true), state.FailedPrecondition)
	if d := s.want(v, state.DeviceAttached); !d.Held || d.ReadOnly || d.Number != before.Number {
		s.Errorf("after the refusal: %+v", d)
	}
	release()
	s.attached(v, true)
}

func (s *suite) detach() {
	v := s.Create(s.T, "detach")
	s.Write(s.T, s.attached(v, false), 4096, []byte("kept"))
	for range 2 {
		s.ok(s.b.Detach(s.ctx, of(v)))
		s.want(v, state.DeviceAbsent)
	}
	got := make([]byte, 4)
	s.Read(s.T, s.attached(v, true), 4096, got)
	if string(got) != "kept" {
		s.Errorf("read %q after attaching again", got)
	}
}

func (s *suite) detachHeld() {
	v := s.Create(s.T, "held")
	before := s.attached(v, false)
	release := s.Hold(s.T, before)
	s.class(s.b.Detach(s.ctx, of(v)), state.Unavailable)
	if d := s.want(v, state.DeviceAttached); !d.Held || d.Number != before.Number {
		s.Errorf("after the refusal: %+v", d)
	}
	release()
	if d := s.find(v); d != before {
		s.Errorf("after the release: %+v, before %+v", d, before)
	}
	s.ok(s.b.Detach(s.ctx, of(v)))
	s.want(v, state.DeviceAbsent)
}

func (s *suite) restart() {
	v := s.Create(s.T, "restart")
	before := s.attached(v, true)
	s.b = s.Open(s.T)
	if d := s.find(v); d != before {
		s.Errorf("after a restart: %+v, before %+v", d, before)
	}
	s.ok(s.b.Detach(s.ctx, of(v)))
	s.b = s.Open(s.T)
	s.want(v, state.DeviceAbsent)
}

func (s *suite) growAbsent() {
	v := s.Create(s.T, "grow-absent")
	s.ok(s.grower().Grow(s.ctx, s.asked(v), 2*Size))
	s.size(s.want(v, state.DeviceAbsent), 2*Size)
	s.ok(s.grower().Grow(s.ctx, s.asked(v), Size)) // never shrinks
	s.size(s.attached(v, false), 2*Size)
}

func (s *suite) growAttached() {
	v := s.Create(s.T, "grow-attached")
	before := s.attached(v, false)
	release := s.Hold(s.T, before)
	s.ok(s.grower().Grow(s.ctx, s.asked(v), 2*Size))
	d := s.want(v, state.DeviceAttached)
	s.size(d, 2*Size)
	if d.Number != before.Number {
		s.Errorf("the device is %s after growing, %s before", d.Number, before.Number)
	}
	release()
	s.ok(s.b.Detach(s.ctx, of(v)))
	s.size(s.attached(v, true), 2*Size)
}

func (s *suite) growTooLarge() {
	v := s.Create(s.T, "grow-too-large")
	s.class(s.grower().Grow(s.ctx, s.asked(v), 1<<60), state.ResourceExhausted)
	s.size(s.want(v, state.DeviceAbsent), Size)
}

func (s *suite) attachConcurrent() {
	v := s.Create(s.T, "concurrent")
	found := make([]state.Device, 8)
	var group sync.WaitGroup
	for i := range found {
		group.Go(func() {
			err := s.b.Attach(s.ctx, s.asked(v), false)
			if err == nil {
				found[i], err = s.b.Find(s.ctx, of(v))
			}
			if err != nil {
				s.Error(err)
			}
		})
	}
	group.Wait()
	for _, d := range found[1:] {
		if d != found[0] || d.State != state.DeviceAttached {
			s.Errorf("%+v beside %+v", d, found[0])
		}
	}
	s.ok(s.b.Detach(s.ctx, of(v)))
	s.b = s.Open(s.T) // which would find a second device
	s.want(v, state.DeviceAbsent)
}

// mixConcurrent attaches, looks and detaches many volumes at a time. Nobody
// holds them, so nothing may fail.
func (s *suite) mixConcurrent() {
	rounds := 10
	if testing.Short() {
		rounds = 3
	}
	var group sync.WaitGroup
	for _, name := range []string{"mix-a", "mix-b", "mix-c", "mix-d", "mix-e", "mix-f", "mix-g", "mix-h"} {
		v := s.Create(s.T, name)
		group.Go(func() {
			for range rounds {
				if err := s.b.Attach(s.ctx, s.asked(v), false); err != nil {
					s.Error(err)
				}
				if d, err := s.b.Find(s.ctx, of(v)); err != nil || d.State != state.DeviceAttached || d.Held {
					s.Errorf("%+v, %v", d, err)
				}
				if err := s.b.Detach(s.ctx, of(v)); err != nil {
					s.Error(err)
				}
			}
		})
	}
	group.Wait()
}

func (s *suite) endedContext() {
	v, ctx := s.Create(s.T, "ended"), s.endedCtx()
	if err := s.b.Attach(ctx, s.asked(v), false); state.ClassOf(err) != state.Canceled {
		s.Errorf("Attach with a context that has ended returns %v, not the context's error", err)
	}
	s.want(v, state.DeviceAbsent)
	before := s.attached(v, false)
	if err := s.b.Detach(ctx, of(v)); state.ClassOf(err) != state.Canceled {
		s.Errorf("Detach with a context that has ended returns %v, not the context's error", err)
	}
	if can[devices.Grower](s.b) {
		if err := s.grower().Grow(ctx, s.asked(v), 2*Size); state.ClassOf(err) != state.Canceled {
			s.Errorf("Grow with a context that has ended returns %v, not the context's error", err)
		}
	}
	if d := s.want(v, state.DeviceAttached); d != before {
		s.Errorf("after calls whose context had ended: %+v, before %+v", d, before)
	}
}

func (s *suite) endedCtx() context.Context {
	ctx, cancel := context.WithCancel(s.ctx)
	cancel()
	return ctx
}

// of returns what a backend is told of a volume of which only the id is known.
func of(id string) devices.Volume { return devices.Volume{ID: id} }

// asked returns what a backend is told of a volume that is to be attached or grown.
func (s *suite) asked(id string) devices.Volume {
	if s.Volume == nil {
		return of(id)
	}
	return s.Volume(id)
}

// The backend as one that can do more, which the test's group says that it can.
func (s *suite) grower() devices.Grower           { return s.b.(devices.Grower) }
func (s *suite) eraser() devices.Eraser           { return s.b.(devices.Eraser) }
func (s *suite) formatter() devices.Formatter     { return s.b.(devices.Formatter) }
func (s *suite) provisioner() devices.Provisioner { return s.b.(devices.Provisioner) }
