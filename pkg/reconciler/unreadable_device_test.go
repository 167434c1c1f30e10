package reconciler

import (
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// A device that cannot be read now may hold all of its data: nothing is written to it, nobody is advised to destroy it,
// and it is mounted once it can be read.
func TestDeviceThatCannotBeReadNow(t *testing.T) {
	unreadable := state.Contents{Kind: state.ContentsOther, Unreadable: true, Found: "nothing, because the device cannot be read: input/output error"}
	for name, change := range map[string]func(*state.Stage){"as ext4": func(*state.Stage) {}, "as what is there": stageOpen, "read-only": stageReadOnly} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(h *harness) {
				v := h.volume("v")
				data := state.Contents{Kind: state.ContentsFilesystem, FSType: "ext4", UUID: "its"}
				v.contents, v.formatted = unreadable, "ext4"
				err := h.do(stage("v", change))
				h.refuse(err, state.Unavailable, "cannot be read: input/output error; see the kernel's log")
				if strings.Contains(err.Error(), "clear-device") {
					t.Errorf("the advice is to destroy it: %v", err)
				}
				h.wantCalls(0, opFormat, "v")
				h.wantCalls(0, opErase, "v")
				h.k.with(func() { v.contents = data })
				h.ok(stage("v", change))
			})
		})
	}
	staged := func() *state.Stage {
		return &state.Stage{Path: "/stage", UUID: "its", Capability: state.Capability{Access: state.MountAccess, FSType: "ext4"}}
	}
	device := state.Device{State: state.DeviceAttached, Path: "/dev/loop7", Number: state.DeviceNumber{Major: 7, Minor: 7}, Size: 1 << 20, Capacity: 1 << 20}
	for name, change := range map[string]func(want *state.Volume, have *state.Actual){
		"a broken file system": func(_ *state.Volume, have *state.Actual) {
			have.Stage.Mounts = []state.Mount{{Device: device.Number, FSType: "ext4", Root: "/", Corrupt: true}}
		},
		"a stale mark": func(_ *state.Volume, have *state.Actual) { have.Device.Formatting, have.Device.StaleMark = true, true },
		"proved blank": func(_ *state.Volume, have *state.Actual) { have.Device.Proved = true },
		"a missing layer": func(want *state.Volume, have *state.Actual) {
			have.Lower, have.Layer = []state.Element{{Device: device}}, "L"
			have.Device = state.Device{State: state.DeviceAbsent, Unmade: true}
			have.Contents, have.Beneath = state.Contents{}, unreadable
			want.Stage.UUID = ""
		},
	} {
		want := &state.Volume{ID: "v", Stage: staged()}
		have := state.Actual{Device: device, View: state.Device{State: state.DeviceAbsent}, Contents: unreadable, Stage: state.Mountpoint{File: state.Directory, Empty: true}}
		change(want, &have)
		v := MakePlan(want, have).Verdicts.Of(state.StagePart())
		if v.Settled || v.Problem.Class != state.Unavailable || strings.Contains(v.Problem.Text, "clear-device") || !strings.Contains(v.Problem.Text, "what is on the device /dev/loop7 is not known") {
			t.Errorf("%s: %+v", name, v)
		}
	}
}
