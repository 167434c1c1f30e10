package pool_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// A volume that is published gets its number back, and its view the view's, be
// it that somebody has removed the device.
func TestPublishedNumbersComeBack(t *testing.T) {
	for _, id := range []string{"vol", strings.Repeat("long", 20)} { // its tag does not hold all of it
		number, viewNumber := machine.FreeLoop(t), machine.FreeLoop(t)
		p, _ := newPool(t)
		b := newBackend(t, p)
		create(t, p, id, pool.Thin)
		b.loops.Reserve(loop.Numbers{
			Owner: func(n state.DeviceNumber) string {
				if n == number || n == viewNumber {
					return id
				}
				return ""
			},
			Published: func(volume string, view bool) []state.DeviceNumber {
				switch {
				case volume != id:
					return nil
				case view:
					return []state.DeviceNumber{viewNumber}
				}
				return []state.DeviceNumber{number}
			},
		})
		for range 2 {
			d := attach(t, b, id, false)
			if d.Number != number {
				t.Errorf("%s is %s, and was published as %s", id, d.Number, number)
			}
			if v := view(t, b, d); v.Number != viewNumber {
				t.Errorf("the view of %s is %s, and was published as %s", id, v.Number, viewNumber)
			}
			require.NoError(t, errors.Join(b.DetachView(t.Context(), d), b.Detach(t.Context(), id)))
			machine.RemoveLoops(t, number.Minor, viewNumber.Minor) // as long as they are there and free, other tests may take them
		}
	}
}
