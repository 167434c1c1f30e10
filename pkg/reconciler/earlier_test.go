package reconciler

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// A look after a step is at what the step may have changed: the whole is looked at
// when a call comes, and the device is asked once more before it is written or detached.
func TestLooksOfACycle(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		for _, step := range []struct {
			what                       string
			request                    request
			find, stage, target, probe int
		}{
			{"stage", stage("v"), 6, 2, 0, 3},
			{"publish", publish("v", 1), 1, 1, 2, 0},
			{"unpublish", unpublish("v", 1), 0, 1, 3, 0},
			{"unstage", unstage("v"), 3, 2, 0, 0},
		} {
			before := func(o op, key string) int { return h.k.count(o, key) }
			find, atStage, atTarget, probe := before(opFind, "v"), before(opLook, stagePath("v")), before(opLook, targetPath("v", 1)), before(opProbe, "v")
			h.ok(step.request)
			find, atStage, atTarget, probe = before(opFind, "v")-find, before(opLook, stagePath("v"))-atStage, before(opLook, targetPath("v", 1))-atTarget, before(opProbe, "v")-probe
			if find > step.find || atStage > step.stage || atTarget > step.target || probe > step.probe {
				t.Errorf("%s: %d looks at the device, %d at the stage, %d at the target, and %d probes; at most %d, %d, %d and %d are needed",
					step.what, find, atStage, atTarget, probe, step.find, step.stage, step.target, step.probe)
			}
		}
		h.atRest("v")
	})
}

// The device is not asked for the end of a target if it was seen just now beneath the same
// mount, unless more is asked, or a change of the device was told.
func TestEndOfATargetNeedsNoDevice(t *testing.T) {
	for name, tt := range map[string]struct {
		meanwhile func(h *harness)
		asked     request
		asks      bool
	}{
		"just seen":     {func(*harness) {}, unpublish("v", 1), false},
		"seen long ago": {func(h *harness) { h.sleep(2 * takeOver) }, unpublish("v", 1), true},
		"a publish":     {func(*harness) {}, publish("v", 3), true},
		"torn off":      {func(h *harness) { h.k.with(func() { h.k.unmount(stagePath("v")); h.k.drift("v") }) }, unpublish("v", 1), true},
		"its device":    {func(h *harness) { h.p.r.DeviceChanged(h.k.volumes["v"].device.number) }, unpublish("v", 1), true},
		"its storage":   {func(h *harness) { h.p.r.VolumeChanged("v") }, unpublish("v", 1), true},
		"all may have":  {func(h *harness) { h.p.r.AllChanged() }, unpublish("v", 1), true},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				h.volume("v")
				h.ok(stage("v"), publish("v", 1), publish("v", 2))
				hang := h.k.hang(opUnmount, targetPath("v", 2), true) // so that the worker is at no look of its own
				first := h.begin(unpublish("v", 2))
				h.pending(first)
				tt.meanwhile(h)
				h.k.slow(opFind, "v", 1, time.Second)
				second := h.begin(tt.asked)
				h.pending(second)
				hang.open()
				if synctest.Wait(); len(second) == 0 != tt.asks {
					t.Errorf("the device is asked: %t", !tt.asks)
				}
				h.sleep(time.Second)
				require.NoError(h.t, h.got(first))
				require.NoError(h.t, h.got(second))
			})
		})
	}
}

// What the step may have changed is never taken over, nor what could not be seen.
func TestNothingUncertainIsTakenOver(t *testing.T) {
	mount := state.Mount{Device: state.DeviceNumber{Major: 7, Minor: 1}, Root: "/"}
	attached := state.Device{State: state.DeviceAttached, Number: mount.Device}
	v := &state.Volume{ID: "v", Stage: &state.Stage{Intent: state.Intent{Begun: true}, Path: "/s", Capability: state.Capability{Access: state.MountAccess}}}
	var targets state.Mountpoints
	targets.Set("/t", state.Mountpoint{File: state.NoFile})
	targets.Set("/u", state.Mountpoint{Err: errUnseen})
	seen := func(step Step) *earlier {
		return &earlier{want: v, step: step, at: time.Now(), have: &state.Actual{
			Device: attached, View: state.Device{State: state.DeviceAbsent}, Contents: state.Contents{Kind: state.ContentsBlank},
			Stage:   state.Mountpoint{File: state.Directory, Mounts: []state.Mount{mount}},
			Targets: targets,
		}}
	}
	bind := seen(Step{Action: Bind, Part: state.TargetPart("/t")})
	if !bind.holds(v) || !bind.mounted() {
		t.Error("nothing is taken over")
	}
	for path, want := range map[string]bool{"/s": true, "/t": false, "/u": false, "/new": false} {
		if _, ok := bind.mountpoint(path); ok != want {
			t.Errorf("%s is taken over: %t", path, ok)
		}
	}
	if _, ok := bind.contents(attached, true); ok {
		t.Error("contents are taken over after a bind")
	}
	mark := seen(Step{Action: BeginFormat})
	if _, ok := mark.contents(attached, true); !ok {
		t.Error("contents are not taken over after the mark")
	}
	if _, ok := mark.contents(state.Device{Number: state.DeviceNumber{Major: 7, Minor: 2}}, true); ok {
		t.Error("contents of another device are taken over")
	}
	made := seen(Step{Action: Mount, Part: state.StagePart()})
	if _, ok := made.mountpoint("/s"); ok {
		t.Error("what is at the staging path is taken over after a mount there")
	}
	made.have.Device.Held, made.have.Device.Holder = true, "a process"
	if d, ok := made.device(); !ok || d != attached {
		t.Errorf("the device is not taken over after a mount, without who held it: %+v", d)
	}
	made.have.Device.State = state.DeviceDetaching
	for what, e := range map[string]*earlier{"that is on its way out": made, "after a bind": bind, "after the mark": mark} {
		if _, ok := e.device(); ok {
			t.Errorf("a device %s is taken over", what)
		}
	}
	for name, tt := range map[string]struct {
		change func(*state.Contents)
		want   bool
	}{
		"sound":    {func(*state.Contents) {}, true},
		"to check": {func(c *state.Contents) { c.NeedsCheck = true }, false},
		"to grow":  {func(c *state.Contents) { c.Growable = true }, false},
		"unread":   {func(c *state.Contents) { c.Err = errUnseen }, false},
		"blank":    {func(c *state.Contents) { c.Kind = state.ContentsBlank }, false},
	} {
		made.have.Contents = state.Contents{Kind: state.ContentsFilesystem}
		tt.change(&made.have.Contents)
		if _, ok := made.contents(attached, true); ok != tt.want {
			t.Errorf("after a mount the contents, %s, are taken over: %t", name, ok)
		}
	}
	made.have.Contents = state.Contents{Kind: state.ContentsFilesystem}
	if _, ok := made.contents(attached, false); ok {
		t.Error("contents are taken over after a mount that is not seen")
	}
	for name, change := range map[string]func(*earlier){
		"late":           func(e *earlier) { e.at = e.at.Add(-2 * takeOver) },
		"unknown device": func(e *earlier) { e.have.Device.State = state.DeviceUnknown },
		"unread facts":   func(e *earlier) { e.have.Device.Err = errUnseen },
		"view":           func(e *earlier) { e.have.View.State = state.DeviceAttached },
		"layer":          func(e *earlier) { e.have.Lower = []state.Element{{}} },
		"another stage": func(e *earlier) {
			e.want = &state.Volume{ID: "v", Stage: &state.Stage{Intent: state.Intent{Revision: 7}, Path: "/s"}}
		},
		"seen elsewhere":   func(e *earlier) { e.have.Elsewhere = &state.Sighting{} },
		"a mounted source": func(e *earlier) { e.have.Source = &state.Source{} },
	} {
		e := seen(bind.step)
		if change(e); e.holds(v) {
			t.Errorf("%s: it is taken over", name)
		}
	}
	for name, change := range map[string]func(*earlier){
		"torn off":   func(e *earlier) { e.have.Stage.Mounts = nil },
		"broken":     func(e *earlier) { e.have.Stage.Mounts[0].Corrupt = true },
		"another's":  func(e *earlier) { e.have.Stage.Mounts[0].Device.Minor = 9 },
		"unseen":     func(e *earlier) { e.have.Stage.Err = errUnseen },
		"covered":    func(e *earlier) { e.have.Stage.Mounts = append(e.have.Stage.Mounts, mount) },
		"going away": func(e *earlier) { e.have.Device.State = state.DeviceDetaching },
	} {
		e := seen(bind.step)
		if change(e); e.mounted() {
			t.Errorf("%s: the stage is believed to stand", name)
		}
	}
}

// What is on a device is read again unless the same mount shows it, and nothing was to be
// done with it.
func TestContentsOfTheSameMount(t *testing.T) {
	number := state.DeviceNumber{Major: 7, Minor: 1}
	seen := func() *state.Actual {
		return &state.Actual{
			Device: state.Device{State: state.DeviceAttached, Number: number, Size: 1 << 20}, Contents: state.Contents{Kind: state.ContentsFilesystem, UUID: "u"},
			Stage: state.Mountpoint{File: state.Directory, Mounts: []state.Mount{{ID: 5, Device: number, Root: "/"}}},
		}
	}
	last := seen()
	if c, ok := contentsOfMount(last, seen()); !ok || c.UUID != "u" {
		t.Errorf("read again: %+v", c)
	}
	if _, ok := contentsOfMount(nil, seen()); ok {
		t.Error("taken from nothing")
	}
	for name, change := range map[string]func(last, have *state.Actual){
		"mounted anew":          func(_, have *state.Actual) { have.Stage.Mounts[0].ID = 6 },
		"mounts without an id":  func(last, have *state.Actual) { last.Stage.Mounts[0].ID, have.Stage.Mounts[0].ID = 0, 0 },
		"torn off":              func(_, have *state.Actual) { have.Stage.Mounts = nil },
		"was not mounted":       func(last, _ *state.Actual) { last.Stage.Mounts = nil },
		"covered":               func(_, have *state.Actual) { have.Stage.Mounts = append(have.Stage.Mounts, state.Mount{}) },
		"broken":                func(_, have *state.Actual) { have.Stage.Mounts[0].Corrupt = true },
		"another device":        func(_, have *state.Actual) { have.Device.Number.Minor = 2 },
		"was another device":    func(last, _ *state.Actual) { last.Device.Number.Minor = 2 },
		"the device has grown":  func(_, have *state.Actual) { have.Device.Size++ },
		"another layer":         func(_, have *state.Actual) { have.Layer = "luks" },
		"it was to grow":        func(last, _ *state.Actual) { last.Contents.Growable = true },
		"it was to be checked":  func(last, _ *state.Actual) { last.Contents.NeedsCheck = true },
		"it could not be read":  func(last, _ *state.Actual) { last.Contents.Err = errUnseen },
		"it was no file system": func(last, _ *state.Actual) { last.Contents.Kind = state.ContentsOther },
	} {
		last, have := seen(), seen()
		if change(last, have); func() bool { _, ok := contentsOfMount(last, have); return ok }() {
			t.Errorf("%s: it is not read again", name)
		}
	}
}

// Nobody who asks nothing is told what was seen before: a look at rest is at everything.
func TestLookAtRestReadsTheDevice(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"))
		before := h.k.count(opProbe, "v")
		h.p.r.Changed(stagePath("v"))
		h.sleep(time.Second)
		if h.k.count(opProbe, "v") == before {
			t.Error("the device is not read")
		}
	})
}

// A call is never answered by what was seen before it came: what was lost meanwhile is
// seen, and is there again when the call is answered.
func TestCallIsNotAnsweredByAnEarlierLook(t *testing.T) {
	bubble(t, func(h *harness) {
		h.volume("v")
		h.ok(stage("v"), publish("v", 2))
		h.k.slow(opBind, targetPath("v", 1), 1, takeOver/2)
		h.k.slow(opBind, targetPath("v", 2), 1, time.Second) // so that a repair after the answer is too late
		first := h.begin(publish("v", 1))
		h.pending(first) // its bind is under way
		h.k.with(func() {
			h.k.unmount(targetPath("v", 2))
			h.k.drift("v")
		})
		require.NoError(t, h.do(publish("v", 2)))
		if lie := h.lie(publish("v", 2)); lie != "" {
			t.Errorf("answered OK, and %s", lie)
		}
		require.NoError(h.t, h.got(first))
	})
}
