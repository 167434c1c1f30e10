package reconciler_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/pkg/state"
)

// TestPlanLayers shows each rule for a volume with a layer.
func TestPlanLayers(t *testing.T) {
	for _, tt := range []struct {
		name string
		want *state.Volume
		have state.Actual
		plan []string
	}{
		// From the source up.
		{"the source is attached first", volume(staged()), actual(device(state.DeviceAbsent), layer(absent)),
			[]string{"attach for stage", "stage: under way"}},
		{"a blank source gets the mark", volume(staged()), actual(attached(), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"begin-format for stage", "stage: under way"}},
		{"then the layer is made", volume(staged()), actual(attached(marked), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"create-layer L for stage", "stage: under way"}},
		{"what an interrupted making left is erased", volume(staged()), actual(attached(marked), layer(absent, unmade), beneath(state.ContentsOther)),
			[]string{"erase for stage", "stage: under way"}},
		{"making it ends before it is opened", volume(staged()), actual(attached(marked), layer(absent, stamped)),
			[]string{"create-layer L for stage", "stage: under way"}},
		{"the layer is opened", volume(staged()), actual(attached(madeLayer), layer(absent, stamped)),
			[]string{"open-layer L for stage", "stage: under way"}},
		{"a new one is formatted", volume(staged()), actual(attached(madeLayer), layer(stamped), blank()),
			[]string{"format L for stage", "stage: under way"}},
		{"and erased first if mkfs was interrupted", volume(staged()), actual(attached(madeLayer), layer(stamped), ext4()),
			[]string{"erase L for stage", "stage: under way"}},
		{"what is on it is mounted", volume(staged()), actual(attached(madeLayer), layer(), ext4()),
			[]string{"mount for stage", "stage: under way"}},
		{"the stage stands", volume(staged(), published(podA)), actual(attached(madeLayer), layer(), ext4(), stageIs(mounted(rw, on(mapped)))),
			[]string{"bind for A", "stage: settled", "A: under way"}},
		{"the type is chosen by what is there", volume(staged(as(""))), actual(attached(madeLayer), layer(), ext4()),
			[]string{"choose for stage", "stage: under way"}},
		{"and not before it is seen", volume(staged(as(""))), actual(attached(madeLayer), layer(absent)),
			[]string{"open-layer L for stage", "stage: under way"}},
		{"it fills a source that has grown", volume(staged()), actual(attached(madeLayer), layer(sized(90, 99)), ext4(), stageIs(mounted(rw, on(mapped)))),
			[]string{"grow-layer L for stage", "stage: under way"}},
		{"a size is that of the source", volume(staged(), size(100)), actual(attached(madeLayer), layer(sized(99, 99)), ext4(), stageIs(mounted(rw, on(mapped)))),
			[]string{"stage: settled", "size: settled"}},
		{"the source grows first", volume(staged(), size(200)), actual(attached(madeLayer), layer(sized(99, 99)), ext4(), stageIs(mounted(rw, on(mapped)))),
			[]string{"grow-device for size", "stage: settled", "size: under way"}},
		{"a new one is shown raw, and is new no more", volume(stagedBlock(), publishedBlock(podA)), actual(attached(madeLayer), layer(stamped)),
			[]string{"mark-raw for A", "stage: settled", "A: under way"}},

		// What is not made, or not formatted.
		{"no layer over data", volume(staged()), actual(attached(), layer(absent, unmade), beneath(state.ContentsFilesystem)),
			[]string{"stage: stuck, FailedPrecondition: neither blank nor bears the layer L"}},
		{"no layer over what was not read", volume(staged()), actual(attached(), layer(absent, unmade)),
			[]string{"stage: stuck, Unavailable: not looked at"}},
		{"no layer in the place of one that is lost", volume(staged()), actual(attached(madeLayer), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"stage: stuck, FailedPrecondition: data is lost"}},
		{"no layer in the place of a file system that was there", volume(staged(its("a"))), actual(attached(), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"stage: stuck, FailedPrecondition: data is lost"}},
		{"no layer over raw data", volume(staged()), actual(attached(shownRaw), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"stage: stuck, FailedPrecondition: published as a raw block device"}},
		{"no layer for reading", volume(staged(readOnly)), actual(attached(readOnlyDevice), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"stage: stuck, FailedPrecondition: read-only access"}},
		{"no layer on what is held", volume(staged()), actual(attached(held), layer(absent, unmade), beneath(state.ContentsBlank)),
			[]string{"stage: stuck, Unavailable: still held"}},
		{"a new one that was opened too early is closed first", volume(staged()), actual(attached(marked), layer(stamped), blank()),
			[]string{"close-layer L for stage", "stage: under way"}},
		{"unless somebody uses it", volume(staged()), actual(attached(marked), layer(stamped, held), blank()),
			[]string{"stage: stuck, FailedPrecondition: in use, or not new"}},
		{"a layer that is not new is not made again", volume(staged()), actual(attached(marked), layer(absent)),
			[]string{"stage: stuck, FailedPrecondition: not new"}},
		{"a layer that is not new is not formatted", volume(staged()), actual(attached(madeLayer), layer(), blank()),
			[]string{"stage: stuck, FailedPrecondition: not new"}},
		{"nor one on which a file system was seen", volume(staged(its("a"))), actual(attached(madeLayer), layer(stamped), blank()),
			[]string{"stage: stuck, FailedPrecondition: data is lost"}},

		// What is in the way.
		{"a device on another element is closed", volume(staged()), actual(attached(madeLayer), layer(stray)),
			[]string{"close-layer L for stage", "stage: under way"}},
		{"unless it is mounted", volume(staged()), actual(attached(madeLayer), layer(stray), stageIs(mounted(rw, on(mapped)))),
			[]string{"stage: stuck, Unavailable: not the volume's any more"}},
		{"or held", volume(staged()), actual(attached(madeLayer), layer(stray, held)),
			[]string{"stage: stuck, Unavailable: in use"}},
		{"somebody else's is left", volume(staged()), actual(attached(madeLayer), layer(foreignDevice)),
			[]string{"stage: stuck, FailedPrecondition: did not open"}},
		{"the mode is changed from the top", volume(staged(readOnly)), actual(attached(madeLayer), layer(), ext4()),
			[]string{"close-layer L for stage", "stage: under way"}},
		{"then beneath", volume(staged(readOnly)), actual(attached(madeLayer), layer(absent), ext4()),
			[]string{"detach for stage", "stage: under way"}},
		{"unless it is in use", volume(staged(readOnly)), actual(attached(madeLayer), layer(held), ext4()),
			[]string{"stage: stuck, FailedPrecondition: in use"}},
		{"that of the layer alone", volume(staged()), actual(attached(madeLayer), layer(readOnlyDevice), ext4()),
			[]string{"close-layer L for stage", "stage: under way"}},

		// Secrets.
		{"it is not opened without its secret", volume(staged()), actual(attached(madeLayer), layer(absent, keyless)),
			[]string{"stage: stuck, Unavailable: waits for its secret"}},
		{"nor made", volume(staged()), actual(attached(), layer(absent, unmade, keyless), beneath(state.ContentsBlank)),
			[]string{"stage: stuck, Unavailable: waits for its secret"}},
		{"nor grown", volume(staged()), actual(attached(madeLayer), layer(sized(90, 99), keyless), ext4(), stageIs(mounted(rw, on(mapped)))),
			[]string{"stage: stuck, Unavailable: waits for its secret"}},
		{"nor closed to be opened otherwise", volume(staged(readOnly)), actual(attached(madeLayer), layer(keyless), ext4()),
			[]string{"stage: stuck, Unavailable: waits for its secret"}},
		{"that of the layer alone neither", volume(staged()), actual(attached(madeLayer), layer(readOnlyDevice, keyless), ext4()),
			[]string{"stage: stuck, Unavailable: waits for its secret"}},
		{"what stands stands without it", volume(staged()), actual(attached(madeLayer), layer(keyless), ext4(), stageIs(mounted(rw, on(mapped)))),
			[]string{"stage: settled"}},
		{"and ends without it", volume(unstaged()), actual(attached(), layer(keyless), stageIs(emptyDir())),
			[]string{"close-layer L for stage", "stage: under way"}},
		{"a source may need one too", volume(staged()), actual(device(state.DeviceAbsent, keyless)),
			[]string{"stage: stuck, Unavailable: the volume waits for its secret"}},
		{"and is not detached to be attached otherwise", volume(staged(readOnly)), actual(attached(keyless)),
			[]string{"stage: stuck, Unavailable: the volume waits for its secret"}},

		// From the top down.
		{"an end closes the layer", volume(unstaged()), actual(attached(held), layer(), stageIs(emptyDir())),
			[]string{"close-layer L for stage", "stage: under way"}},
		{"then detaches the source", volume(unstaged()), actual(attached(), layer(absent), stageIs(emptyDir())),
			[]string{"detach for stage", "stage: under way"}},
		{"a layer that is held stays", volume(unstaged()), actual(attached(), layer(held), stageIs(fullDir())),
			[]string{"stage: stuck, Unavailable: still held"}},
		{"an end closes what stands on another element", volume(unstaged()), actual(device(state.DeviceAbsent), layer(stray), stageIs(emptyDir())),
			[]string{"close-layer L for stage", "stage: under way"}},
		{"and leaves what is somebody else's", volume(unstaged()), actual(device(state.DeviceAbsent), layer(foreignDevice), stageIs(emptyDir())),
			[]string{"stage: settled"}},
		{"an end is not seen while the layer is not", volume(unstaged()), actual(attached(), layer(unseenState), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: not known now"}},
		{"nor while the source is not", volume(unstaged()), actual(device(state.DeviceUnknown), layer(absent), stageIs(emptyDir())),
			[]string{"stage: stuck, Unavailable: not known now"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			told := tellPlan(tt.want, reconciler.MakePlan(tt.want, tt.have))
			if !slices.EqualFunc(told, tt.plan, matches) {
				t.Errorf("plan\n\t%s\nwant\n\t%s", strings.Join(told, "\n\t"), strings.Join(tt.plan, "\n\t"))
			}
		})
	}
}

// mapped is the number of a layer's device.
var mapped = state.DeviceNumber{Major: 253, Minor: 1}

// layer puts the device of layer L on what was the device until now.
func layer(facts ...deviceFact) fact {
	return func(have *state.Actual) {
		source := have.Device
		have.Lower = []state.Element{{Device: source}}
		have.Layer = "L"
		d := &have.Device
		*d = state.Device{State: state.DeviceAttached, Path: "/dev/mapper/v", Number: mapped, Size: 99, Capacity: 99, ReadOnly: source.ReadOnly}
		for _, fact := range facts {
			fact(d)
		}
		// As the reconciler has it from the source.
		d.Missing, d.Formatting, d.Raw = source.Missing, d.Fresh, source.Raw && !d.Fresh
	}
}

func absent(d *state.Device) {
	d.State, d.Number, d.Path, d.Size = state.DeviceAbsent, state.DeviceNumber{}, "", 0
}
func unmade(d *state.Device)        { d.Unmade = true }
func stamped(d *state.Device)       { d.Fresh = true }
func stray(d *state.Device)         { d.State, d.Stray = state.DeviceForeign, true }
func foreignDevice(d *state.Device) { d.State = state.DeviceForeign }
func unseenState(d *state.Device)   { d.State = state.DeviceUnknown }
func madeLayer(d *state.Device)     { d.Formatted = "L" }

func keyless(d *state.Device) { d.NeedsSecret = true }

func beneath(kind state.ContentsKind) fact {
	return func(have *state.Actual) { have.Beneath = state.Contents{Kind: kind, Found: "something"} }
}
