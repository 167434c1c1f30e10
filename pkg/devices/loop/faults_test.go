package loop

import (
	"testing"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// A view that is refused is not there for a moment either.
func TestRefusedViewLeavesNoDevice(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	meant := d
	meant.Number.Minor += 1000
	wantError(t, b.AttachView(t.Context(), meant), state.Unavailable, d.Path)
	names, err := bound()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if backingOf(name) == d.Path {
			t.Errorf("/dev/%s was attached over %s", name, d.Path)
		}
	}
}
