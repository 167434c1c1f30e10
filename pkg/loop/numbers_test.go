package loop

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// numberFor attaches for a volume, detaches, and returns the number that it had.
func numberFor(t *testing.T, s *Devices, r Request) state.DeviceNumber {
	t.Helper()
	d := attach(t, s, r)
	detached(t, s, r.Target)
	return d.Number()
}

// A number that somebody shows is given to nobody but who is published with it.
func TestShownNumbersAreSpared(t *testing.T) {
	s := newDevices(t)
	vol, other := request(newFile(t, "vol"), "vol"), request(newFile(t, "other"), "other")
	shown, alone := numberFor(t, s, other), machine.FreeLoop(t) // other tests may have the first for a while
	name := addLoop(t, alone)
	owner, bound := "", false
	s.Reserve(Numbers{
		Owner: func(n state.DeviceNumber) string {
			if n == shown || n == alone {
				return owner
			}
			return ""
		},
		Bound: func(n state.DeviceNumber) (bool, error) { return (n == shown || n == alone) && bound, nil },
	})
	for _, tt := range []struct {
		owner    string
		bound    bool
		reserved bool
	}{{"other", true, true}, {"other", false, true}, {"", true, true}, {"vol", true, false}, {"", false, false}} {
		owner, bound = tt.owner, tt.bound
		if got, err := s.reserved(name, Request{Volume: "vol"}); err != nil || got != tt.reserved {
			t.Errorf("%+v: spared %t, %v", tt, got, err)
		}
		if got := numberFor(t, s, vol); got == shown && tt.reserved {
			t.Errorf("%+v: the volume got the number %s", tt, shown)
		}
	}

	unknown := errors.New("no news")
	s.Reserve(Numbers{Bound: func(state.DeviceNumber) (bool, error) { return false, unknown }})
	if err := s.Attach(t.Context(), vol); !errors.Is(err, unknown) {
		t.Errorf("attached though it is not known what is bound: %v", err)
	}
}

// What is bound between the choice of a number and the attach would show the volume.
func TestNumberThatIsBoundMeanwhileIsSpared(t *testing.T) {
	s, vol := newDevices(t), request(newFile(t, "vol"), "vol")
	asked := map[state.DeviceNumber]bool{}
	var first state.DeviceNumber
	s.Reserve(Numbers{Bound: func(n state.DeviceNumber) (bool, error) {
		if len(asked) == 0 {
			first = n
		}
		again := asked[n]
		asked[n] = true
		return again && n == first, nil
	}})
	d := attach(t, s, vol)
	if d.Number() == first {
		t.Errorf("the volume got the number %s, which is bound by now", first)
	}
	detached(t, s, vol.Target)
}

// addLoop makes the loop device with a number.
func addLoop(t *testing.T, number state.DeviceNumber) (name string) {
	t.Helper()
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	require.NoError(t, err)
	defer control.Close()
	s := &Devices{numbers: Numbers{Published: func(string, bool) []state.DeviceNumber { return []state.DeviceNumber{number} }}}
	if name, err = s.publishedDevice(control, Request{Volume: "vol"}); err != nil || name == "" {
		t.Fatalf("no device %s: %v", number, err)
	}
	return name
}

// Whoever looks at a device that somebody removes is told that there is none: an
// attach then takes another.
func TestNumberOfADeviceThatIsRemoved(t *testing.T) {
	number := machine.FreeLoop(t)
	name := addLoop(t, number)
	done := make(chan struct{})
	var looks sync.WaitGroup
	for range 4 {
		looks.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				if now, err := numberOf(name); err != nil && !errors.Is(err, os.ErrNotExist) || err == nil && now != number {
					t.Errorf("the number of %s is %s, %v", name, now, err)
					return
				}
			}
		})
	}
	for range 30 {
		machine.RemoveLoops(t, number.Minor)
		addLoop(t, number)
	}
	close(done)
	looks.Wait()
}

// With partitions (loop.max_part), a device's number is not the one in its name.
func TestNumbersWithPartitions(t *testing.T) {
	dir := t.TempDir()
	replace(t, &sysBlock, dir)
	replace(t, &sysNumbers, filepath.Join(dir, "numbers"))
	replace(t, &maxPartPath, filepath.Join(dir, "max_part"))
	shifted, unshifted := state.DeviceNumber{Major: 7, Minor: 5 << 4}, state.DeviceNumber{Major: 7, Minor: 5}
	put(t, filepath.Join(dir, "loop5", "dev"), shifted.String()+"\n")
	put(t, maxPartPath, "15\n")
	s := &Devices{}
	for number, want := range map[state.DeviceNumber]bool{shifted: true, unshifted: false} {
		s.Reserve(Numbers{Bound: func(n state.DeviceNumber) (bool, error) { return n == number, nil }})
		if got, err := s.reserved("loop5", Request{Volume: "vol"}); err != nil || got != want {
			t.Errorf("where %s is bound, loop5 (%s) is spared: %t, %v", number, shifted, got, err)
		}
	}
	if index, err := indexOf(shifted); err != nil || index != 5 {
		t.Errorf("%s is of loop%d, %v", shifted, index, err)
	}
}

// A device that others were faster to take, or have claimed, is not offered again,
// though the kernel says that it is free.
func TestTakenDeviceIsPassedOver(t *testing.T) {
	s, vol := newDevices(t), request(newFile(t, "vol"), "vol")
	control, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	require.NoError(t, err)
	defer control.Close()
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	require.NoError(t, err)
	if name, _, err := s.free(t.Context(), control, vol, false, map[string]bool{nameOf(n): true}); err != nil || name == nameOf(n) {
		t.Errorf("offered %s, which is taken (%v)", name, err)
	}
	d := attach(t, s, vol)
	noFile := unix.LoopConfig{Fd: math.MaxUint32} // EBADF, if the kernel was asked: it would claim the device, which a mkfs may be about to open
	if taken, err := s.bind(t.Context(), d.name, nil, &noFile, Shape{}, false, nil); err != nil || !taken {
		t.Errorf("an attached device is passed over without LOOP_CONFIGURE: %t, %v", taken, err)
	}
	claimed, err := open(d.name, os.O_RDONLY|unix.O_EXCL)
	require.NoError(t, err)
	defer claimed.Close()
	backing, err := request(newFile(t, "other"), "other").Open()
	require.NoError(t, err)
	defer backing.Close()
	if taken, err := s.bind(t.Context(), d.name, backing, &unix.LoopConfig{Fd: uint32(backing.Fd())}, Shape{}, false, nil); err != nil || !taken {
		t.Errorf("a claimed device is taken: %t, %v", taken, err)
	}
	// LOOP_CONFIGURE itself claims the device for a moment, which this process must not
	// take for a holder of the volume.
	done, err := s.Turn(t.Context(), d.name)
	require.NoError(t, err)
	defer done()
	over, cancel := context.WithCancel(t.Context())
	cancel()
	if taken, err := s.bind(over, d.name, backing, &unix.LoopConfig{Fd: uint32(backing.Fd())}, Shape{}, false, nil); taken || !errors.Is(err, context.Canceled) {
		t.Errorf("configured while somebody looks whether it is held: %t, %v", taken, err)
	}
}

// What is published as another kind of device says nothing of the loop device with its minor.
func TestPublishedAsADisk(t *testing.T) {
	view := state.DeviceNumber{Major: loopMajor, Minor: 5}
	s := &Devices{numbers: Numbers{Published: func(string, bool) []state.DeviceNumber { return []state.DeviceNumber{{Major: 8, Minor: 16}, view} }}}
	if all := s.published(Request{Volume: "v"}); len(all) != 1 || all[0] != view {
		t.Errorf("%v, want %s alone", all, view)
	}
}
