package state

import (
	"slices"
	"testing"
)

// A read-only target of a writable stage shows the view, that of a read-only stage the device
// or the view.
func TestPublishedAs(t *testing.T) {
	writer, reader := DeviceNumber{Major: 8, Minor: 16}, DeviceNumber{Major: 7, Minor: 1}
	for readOnly, want := range map[bool][2][]DeviceNumber{
		false: {{writer}, {reader}},
		true:  {{reader, writer}, {reader, writer}},
	} {
		v := &Volume{Stage: &Stage{ReadOnly: readOnly}, Targets: map[string]*Target{
			"/reader": {Path: "/reader", ReadOnly: true, SeenDevice: SeenDevice{Device: reader}},
			"/writer": {Path: "/writer", ReadOnly: readOnly, SeenDevice: SeenDevice{Device: writer}},
			"/coming": {Path: "/coming", ReadOnly: true},
		}}
		for view, want := range map[bool][]DeviceNumber{false: want[0], true: want[1]} {
			if got := v.PublishedAs(view); !slices.Equal(got, want) {
				t.Errorf("stage read-only %t, view %t: %v, want %v", readOnly, view, got, want)
			}
		}
	}
}
