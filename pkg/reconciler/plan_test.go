package reconciler_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// A record of which nothing was looked at is planned nothing for.
func TestPlanWithoutALook(t *testing.T) {
	want := volume(staged(), size(100), published(podA), unpublished(podB))
	plan := reconciler.MakePlan(want, state.Actual{})
	if len(plan.Steps) > 0 {
		t.Errorf("steps %v", plan.Steps)
	}
	for part, v := range plan.Verdicts {
		if v.Settled {
			t.Errorf("%s is settled", part)
		}
	}
}

func TestProblems(t *testing.T) {
	plan := reconciler.MakePlan(volume(staged(), published(podB), published(podA), size(200)),
		actual(attached(sized(200, 200)), ext4(growable), stageIs(mounted(rw)), targetIs(podA, foreign()), targetIs(podB, unseenNow())))
	var parts []string
	for part, v := range plan.Verdicts {
		if v.Problem == (reconciler.Problem{}) {
			continue
		}
		if v.Problem.Text == "" {
			t.Errorf("%s has a problem without words", part)
		}
		parts = append(parts, part.String())
	}
	slices.Sort(parts)
	if want := []string{"size", "target " + podA, "target " + podB}; !slices.Equal(parts, want) {
		t.Errorf("problems of %q, want %q", parts, want)
	}
}

// A volume that is larger than the limit of a size, or would be, refuses it, unless
// it has that size already.
func TestPlanSizeWithinItsLimit(t *testing.T) {
	for _, tt := range []struct {
		bytes, limit, capacity int64 // of a device of 100 bytes
		class                  state.Class
		words                  string
	}{
		{50, 99, 100, state.OutOfRange, "never shrinks"},
		{50, 150, 200, state.OutOfRange, "never shrinks"},
		{150, 200, 100, state.OutOfRange, "rounded up"},
		{150, 4096, 100, 0, ""},
		{50, 100, 100, 0, ""},
	} {
		want := volume(staged(), size(tt.bytes))
		want.Size.Limit = tt.limit
		plan := reconciler.MakePlan(want, actual(attached(sized(100, tt.capacity)), ext4(), stageIs(mounted(rw))))
		v := plan.Verdicts[state.SizePart()]
		if told := v.Problem.Text != ""; told != (tt.words != "") || told && (v.Problem.Class != tt.class || !strings.Contains(v.Problem.Text, tt.words)) {
			t.Errorf("%+v: %+v", tt, v)
		}
		if grows := slices.Contains(plan.Steps, reconciler.Step{Action: reconciler.GrowDevice, Part: state.SizePart()}); grows != (tt.words == "" && tt.bytes > 100) {
			t.Errorf("%+v: steps %v", tt, plan.Steps)
		}
	}
}

// ---- Builders of desired states. ----

const (
	podA = "/pods/a/mount"
	podB = "/pods/b/mount"
)

type asker func(*state.Volume)

func volume(asked ...asker) *state.Volume {
	v := &state.Volume{ID: "vol", Targets: map[string]*state.Target{}}
	for _, ask := range asked {
		ask(v)
	}
	return v
}

// how is an option of a stage or a target; the other is nil.
type how func(s *state.Stage, t *state.Target)

func stageOf(c state.Capability, options []how) asker {
	return func(v *state.Volume) {
		v.Stage = &state.Stage{Path: "/staging", Capability: c}
		for _, option := range options {
			option(v.Stage, nil)
		}
	}
}

func targetOf(path string, c state.Capability, options []how) asker {
	return func(v *state.Volume) {
		t := &state.Target{Path: path, Capability: c}
		v.Targets[path] = t
		for _, option := range options {
			option(nil, t)
		}
	}
}

var asFilesystem = state.Capability{Access: state.MountAccess, FSType: "ext4"}

func staged(options ...how) asker                 { return stageOf(asFilesystem, options) }
func unstaged() asker                             { return stageOf(asFilesystem, []how{gone}) }
func published(path string, options ...how) asker { return targetOf(path, asFilesystem, options) }
func unpublished(path string, options ...how) asker {
	return targetOf(path, asFilesystem, append(options, gone))
}
func size(bytes int64) asker { return func(v *state.Volume) { v.Size = &state.Size{Bytes: bytes} } }

func readOnly(s *state.Stage, t *state.Target) {
	if s != nil {
		s.ReadOnly = true
	} else {
		t.ReadOnly = true
	}
}

func gone(s *state.Stage, t *state.Target) {
	if s != nil {
		s.Gone = true
	} else {
		t.Gone = true
	}
}

func accepted(_ *state.Stage, t *state.Target) { t.Accepted = true }

// ---- Builders of actual states. ----

var disk = state.DeviceNumber{Major: 7, Minor: 1}

type fact func(*state.Actual)

// actual is what was looked at with nothing there, and then the facts.
func actual(facts ...fact) state.Actual {
	have := state.Actual{
		Device: state.Device{State: state.DeviceAbsent, Size: 100, Capacity: 100}, View: state.Device{State: state.DeviceAbsent},
		Stage: nothingThere(), Targets: map[string]state.Mountpoint{podA: nothingThere(), podB: nothingThere()},
	}
	for _, fact := range facts {
		fact(&have)
	}
	return have
}

type deviceFact func(*state.Device)

func device(s state.DeviceState, facts ...deviceFact) fact {
	return func(have *state.Actual) {
		d := &have.Device
		*d = state.Device{State: s, Size: 100, Capacity: 100}
		if s == state.DeviceAttached || s == state.DeviceDetaching {
			d.Path, d.Number = "/dev/loop1", disk
		}
		for _, fact := range facts {
			fact(d)
		}
	}
}

func attached(facts ...deviceFact) fact { return device(state.DeviceAttached, facts...) }

func sized(bytes, capacity int64) deviceFact {
	return func(d *state.Device) { d.Size, d.Capacity = bytes, capacity }
}

type contentsFact func(*state.Contents)

func contents(c state.Contents, facts ...contentsFact) fact {
	for _, fact := range facts {
		fact(&c)
	}
	return func(have *state.Actual) { have.Contents = c }
}

func ext4(facts ...contentsFact) fact {
	return contents(state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4"}, facts...)
}
func growable(c *state.Contents) { c.Growable = true }

func stageIs(m state.Mountpoint) fact { return func(have *state.Actual) { have.Stage = m } }
func targetIs(path string, m state.Mountpoint) fact {
	return func(have *state.Actual) { have.Targets[path] = m }
}

func nothingThere() state.Mountpoint { return state.Mountpoint{File: state.NoFile} }
func emptyDir() state.Mountpoint     { return state.Mountpoint{File: state.Directory, Empty: true} }
func fullDir() state.Mountpoint      { return state.Mountpoint{File: state.Directory} }
func unseenNow() state.Mountpoint    { return state.Mountpoint{Err: errors.New("timed out")} }

type mountFact func(*state.Mount)

// mounted is the file system of the device.
func mounted(facts ...mountFact) state.Mountpoint {
	m := state.Mount{Device: disk, FSType: "ext4", Source: "/dev/loop1", Root: "/"}
	for _, fact := range facts {
		fact(&m)
	}
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{m}}
}

func rw(m *state.Mount) { m.Attributes &^= state.ReadOnly }
func ro(m *state.Mount) { m.Attributes |= state.ReadOnly }

func foreign() state.Mountpoint {
	return state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{FSType: "tmpfs", Source: "tmpfs", Root: "/"}}}
}
