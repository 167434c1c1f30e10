package pool_test

import (
	"errors"
	"math/bits"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// ownNumber returns the number of a loop device that nobody else uses, and that
// there is none of yet.
func ownNumber(t *testing.T) state.DeviceNumber {
	t.Helper()
	machine.Kernel(t)
	index := 20000 + rand.IntN(10000) // the kernel gives the lowest number that is free
	number := state.DeviceNumber{Major: 7, Minor: uint32(index) << minorBits(t)}
	t.Cleanup(func() { removeLoops(t, number) })
	return number
}

// minorBits is for how many bits of a minor its partitions are.
func minorBits(t *testing.T) int {
	t.Helper()
	text := sysfs("/sys/module/loop/parameters/max_part")
	if text == "" {
		return 0
	}
	parts, err := strconv.ParseUint(text, 10, 32)
	require.NoError(t, err)
	return bits.Len64(parts)
}

// removeLoops removes the loop devices with the numbers that are there.
func removeLoops(t *testing.T, numbers ...state.DeviceNumber) {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	require.NoError(t, err)
	defer control.Close()
	for _, number := range numbers {
		index := int(number.Minor >> minorBits(t))
		if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, index); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, unix.EBUSY) { // EBUSY: somebody looks at it
			t.Errorf("remove loop%d: %v", index, err)
		}
	}
}

// A volume that is published gets its number back, and its view the view's, be
// it that somebody has removed the device.
func TestPublishedNumbersComeBack(t *testing.T) {
	for _, id := range []string{"vol", strings.Repeat("long", 20)} { // its tag does not hold all of it
		number, viewNumber := ownNumber(t), ownNumber(t)
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
			removeLoops(t, number, viewNumber) // as long as they are there and free, other tests may take them
		}
	}
}
