package devices

import (
	"testing"

	"github.com/csi-node/csi-node/pkg/state"
)

// choosy is a layer that a value of its key asks for.
type choosy struct{ ClassLayer }

func (choosy) Wanted(v Volume) bool { return v.Context["compress"] == "a&b=c" }

func TestCreatedWith(t *testing.T) {
	for value, want := range map[string]bool{"a&b=c": true, "off": false, "": false} {
		if got := CreatedWith(choosy{}, state.Device{Layers: LayersText(map[string]string{"compress": value, "encryption": "luks2"})}); got != want {
			t.Errorf("%q: %t", value, got)
		}
	}
	if CreatedWith(choosy{}, state.Device{}) || LayersText(nil) != "" {
		t.Error("a volume without layers has one")
	}
}
