package loop

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// alter does what a pod can do with a device that it has for writing.
func alter(t *testing.T, d *Device, change func(*unix.LoopInfo64)) {
	t.Helper()
	f, err := os.OpenFile(d.Path(), os.O_RDWR, 0)
	require.NoError(t, err)
	defer f.Close()
	info, err := unix.IoctlLoopGetStatus64(int(f.Fd()))
	require.NoError(t, err)
	change(info)
	require.NoError(t, unix.IoctlLoopSetStatus64(int(f.Fd()), info))
}

func setTag(tag string) func(*unix.LoopInfo64) {
	return func(info *unix.LoopInfo64) {
		info.File_name = [64]uint8{}
		copy(info.File_name[:tagSize], tag)
	}
}

// A pod cannot keep the device of its volume from being taken down.
func TestAlteredDeviceIsRestored(t *testing.T) {
	for name, change := range map[string]func(*unix.LoopInfo64){
		"tag":    setTag("mine"),
		"offset": func(info *unix.LoopInfo64) { info.Offset = 4096 },
		"limit":  func(info *unix.LoopInfo64) { info.Sizelimit = 4096 },
	} {
		t.Run(name, func(t *testing.T) {
			s, to := newDevices(t), newFile(t, name)
			d := attach(t, s, request(to, "vol"))
			alter(t, d, change)
			now, err := s.Recall(t.Context(), to)
			if err != nil || now == nil || !to.Owns(now) || now.bytes != size || now.sequence != d.sequence {
				t.Errorf("after it was altered: %+v, %v", now, err)
			}
			alter(t, d, change)
			to.File = nil // the pool is away
			detached(t, s, to)
			if left := over(t, to.Path); len(left) > 0 {
				t.Errorf("still attached: %q", left)
			}
		})
	}
}

// A pod cannot pass the device of its volume off as that of another, whose own one is known
// after a restart, too. A file is not attached twice.
func TestTagOfAnotherVolume(t *testing.T) {
	for name, published := range map[string]bool{"published": true, "no record": false} {
		t.Run(name, func(t *testing.T) {
			before, theirs, mine := newDevices(t), newFile(t, "theirs"), newFile(t, "mine")
			victim, d := attach(t, before, request(theirs, "theirs")), attach(t, before, request(mine, "mine"))
			alter(t, d, setTag(theirs.Tag))

			s := newDevices(t)
			numbers := s.numbers
			if published {
				numbers.Owner = func(n state.DeviceNumber) string {
					return map[state.DeviceNumber]string{d.number: "mine"}[n]
				}
			}
			s.Reserve(numbers)
			files := map[FileID]Known{theirs.File.ID: {theirs.Tag, "theirs"}, mine.File.ID: {mine.Tag, "mine"}}
			require.NoError(t, s.Recognize(t.Context(), files))
			if now, err := s.Recall(t.Context(), theirs); err != nil || now == nil || now.number != victim.number {
				t.Errorf("the other volume has %v (%v), want %v", now, err, victim)
			}
			now, err := s.Recall(t.Context(), mine)
			if err != nil || now == nil || now.number != d.number || mine.Owns(now) != published {
				t.Errorf("the pod's own volume has %v (%v), want %v", now, err, d)
			}
			if err := s.Attach(t.Context(), request(mine, "mine")); (err == nil) != published {
				t.Errorf("attach: %v", err)
			}
			if nodes := over(t, mine.Path); len(nodes) != 1 {
				t.Errorf("attached as %q", nodes)
			}
		})
	}
}

// Before the files are known, such as while the pool is away, a tag is believed; but not any
// more when they are.
func TestTagIsNotBelievedAgainstTheFile(t *testing.T) {
	before, theirs, mine := newDevices(t), newFile(t, "theirs"), newFile(t, "mine")
	d := attach(t, before, request(mine, "mine"))
	alter(t, d, setTag(theirs.Tag))
	s := newDevices(t)
	if name := s.Seen(theirs.Tag); name != d.name {
		t.Fatalf("seen: %q, want %q", name, d.name)
	}
	if now, err := s.Recall(t.Context(), theirs); now != nil || err != nil {
		t.Errorf("the other volume has %v, %v", now, err)
	}
}

// forge does what a pod can do with a device that it has for writing: it shows a file of its
// own as the device of another volume. The pod has the device open.
func forge(t *testing.T, d *Device, own Target, tag string, flags uint32) {
	t.Helper()
	f, err := os.OpenFile(d.Path(), os.O_RDWR, 0)
	require.NoError(t, err)
	backing := d.Backing()
	require.NoError(t, unix.IoctlSetInt(int(f.Fd()), unix.LOOP_CLR_FD, 0))
	require.NoError(t, f.Close())
	machine.AwaitDetached(d.Path(), backing)
	f, err = os.OpenFile(d.Path(), os.O_RDWR, 0)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	shown, err := os.OpenFile(own.Path, os.O_RDWR, 0)
	require.NoError(t, err)
	defer shown.Close()
	config := unix.LoopConfig{Fd: uint32(shown.Fd()), Size: 512}
	config.Info.Flags = flags
	copy(config.Info.File_name[:tagSize], tag)
	require.NoError(t, unix.IoctlLoopConfigure(int(f.Fd()), &config))
}

// A pod cannot put a device of its own in the place of another volume's, whichever of them is
// looked at first. Without a record of the pod's, a backing with the place of a volume that is
// not attached may be an earlier file of that one.
func TestForgedDevice(t *testing.T) {
	for _, tt := range []struct{ readOnly, attached, first, published bool }{
		{true, true, true, true}, {true, true, true, false}, {true, true, false, true}, {true, true, false, false},
		{true, false, true, true}, {true, false, true, false}, {true, false, false, true}, {true, false, false, false},
		{false, true, true, true}, {false, true, true, false}, {false, true, false, true}, {false, true, false, false},
		{false, false, true, true}, {false, false, false, true},
	} {
		t.Run(fmt.Sprintf("%+v", tt), func(t *testing.T) {
			numbers := []state.DeviceNumber{machine.FreeLoop(t), machine.FreeLoop(t)}
			slices.SortFunc(numbers, func(a, b state.DeviceNumber) int { return int(a.Minor) - int(b.Minor) })
			if !tt.first {
				slices.Reverse(numbers)
			}
			before, theirs, mine := newDevices(t), newFile(t, "theirs"), newFile(t, "mine")
			own, flags := newFile(t, "theirs"), uint32(0) // a path with the other volume's place
			if tt.readOnly {
				own, flags = newFile(t, "own"), unix.LO_FLAGS_READ_ONLY
			}
			before.numbers.Published = func(volume string, _ bool) []state.DeviceNumber {
				return map[string][]state.DeviceNumber{"mine": numbers[:1], "theirs": numbers[1:]}[volume]
			}
			d, victim := attach(t, before, request(mine, "mine")), attach(t, before, request(theirs, "theirs"))
			forge(t, d, own, theirs.Tag, flags)
			forged, err := ask(d.name)
			require.NoError(t, err)
			if !tt.attached {
				detached(t, before, theirs)
			}

			s := newDevices(t)
			owners := s.numbers
			if tt.published {
				owners.Owner = func(n state.DeviceNumber) string {
					return map[state.DeviceNumber]string{d.number: "mine"}[n]
				}
				reader, err := os.Open(theirs.Path) // so that all devices are looked at
				require.NoError(t, err)
				defer reader.Close()
			}
			s.Reserve(owners)
			require.NoError(t, s.Recognize(t.Context(), map[FileID]Known{theirs.File.ID: {theirs.Tag, "theirs"}, mine.File.ID: {mine.Tag, "mine"}}))
			if now, err := s.Recall(t.Context(), theirs); err != nil || (now != nil) != tt.attached || now != nil && now.number != victim.number {
				t.Errorf("the other volume has %v, %v", now, err)
			}
			if now := attach(t, s, request(theirs, "theirs")); now.number == d.number || now.File() != theirs.File.ID {
				t.Errorf("the other volume has got %v", now)
			}
			detached(t, s, theirs)
			if left := over(t, theirs.Path); len(left) > 0 {
				t.Errorf("still attached: %q", left)
			}
			if now, err := ask(d.name); err != nil || now == nil || *now != *forged {
				t.Errorf("the pod's device is %+v, %v", now, err)
			}
		})
	}
}

// A pod cannot keep the read-only device of its volume from being taken down by what it puts
// behind it while there is no plugin.
func TestSwappedFileIsKnownAfterARestart(t *testing.T) {
	before, to, own := newDevices(t), newFile(t, "shown"), newFile(t, "own")
	r := Request{Target: to, Shape: Shape{ReadOnly: true, Sector: 512}, Volume: "shown", Open: func() (*os.File, error) { return OpenFile(to.Path, to.File.ID, os.O_RDONLY) }}
	d := attach(t, before, r)
	swap(t, d, own.Path)
	s := newDevices(t)
	publishAs(s, d.number, "shown", true)
	require.NoError(t, s.Recognize(t.Context(), map[FileID]Known{to.File.ID: {to.Tag, "shown"}}))
	if now, err := s.Recall(t.Context(), to); err != nil || now == nil || now.number != d.number {
		t.Errorf("it is %v, %v", now, err)
	}
	detached(t, s, to)
	if left := over(t, own.Path); len(left) > 0 {
		t.Errorf("still attached: %q", left)
	}
}

// swap puts a file behind a read-only device, as a pod can that has it for reading.
func swap(t *testing.T, d *Device, path string) {
	t.Helper()
	f, err := os.Open(d.Path())
	require.NoError(t, err)
	defer f.Close()
	backing, err := os.Open(path)
	require.NoError(t, err)
	defer backing.Close()
	require.NoError(t, unix.IoctlSetInt(int(f.Fd()), loopChangeFD, int(backing.Fd())))
}

func viewRequest(d *Device, volume string) Request {
	return Request{Target: ViewOf(d.number), Shape: Shape{ReadOnly: true, Sector: 512}, Volume: volume, Open: func() (*os.File, error) { return os.Open(d.Path()) }}
}

// publishAs publishes the view of a volume with a number, whose node is bound there or not.
func publishAs(s *Devices, number state.DeviceNumber, volume string, bound bool) Numbers {
	numbers := s.numbers
	numbers.Owner = func(n state.DeviceNumber) string { return map[state.DeviceNumber]string{number: volume}[n] }
	numbers.Published = func(v string, view bool) []state.DeviceNumber {
		return map[string][]state.DeviceNumber{volume: {number}}[v]
	}
	numbers.Shown = func(_ context.Context, v string, n state.DeviceNumber) bool {
		return bound && v == volume && n == number
	}
	s.Reserve(numbers)
	return numbers
}

// A pod that has a view for reading can make it show a file of its own. That neither stays,
// nor keeps the view from being taken down.
func TestSwappedViewIsRestored(t *testing.T) {
	s, to, own := newDevices(t), newFile(t, "shown"), newFile(t, "own")
	d := attach(t, s, request(to, "vol"))
	r := viewRequest(d, "vol")
	view := attach(t, s, r)
	numbers := publishAs(s, view.number, "vol", true)
	swap := func(path string) { t.Helper(); swap(t, view, path) }
	paths := []string{own.Path, attach(t, s, request(own, "own")).Path()}
	for _, path := range paths {
		swap(path)
		now, err := s.Recall(t.Context(), r.Target)
		if err != nil || now == nil || now.number != view.number || now.over() != d.number || now.Backing() != d.Path() {
			t.Errorf("after %s was put behind it: %+v, %v", path, now, err)
		}
	}
	for _, path := range paths {
		swap(path)
		restarted := newDevices(t)
		restarted.Reserve(numbers)
		if now := attach(t, restarted, r); now.number != view.number || now.Backing() != d.Path() {
			t.Errorf("after %s was put behind it, and a restart: %+v", path, now)
		}
	}
	swap(own.Path)
	alter(t, view, func(info *unix.LoopInfo64) { info.Sizelimit = size / 2 })
	if now, err := s.Recall(t.Context(), r.Target); err != nil || now == nil || now.over() != d.number || now.bytes != size {
		t.Errorf("swapped and altered: %+v, %v", now, err)
	}
	swap(own.Path)
	detached(t, s, r.Target)
	if left := slices.Concat(overDevice(t, d.Path()), over(t, own.Path)[1:]); len(left) > 0 { // the first is its own
		t.Errorf("still attached: %q", left)
	}
}

// The same holds for a volume that is attached read-only itself. It is taken down without its
// file, too.
func TestSwappedFileIsRestored(t *testing.T) {
	s, to, own := newDevices(t), newFile(t, "shown"), newFile(t, "own")
	r := Request{Target: to, Shape: Shape{ReadOnly: true, Sector: 512}, Volume: "vol", Open: func() (*os.File, error) { return OpenFile(to.Path, to.File.ID, os.O_RDONLY) }}
	for _, away := range []bool{false, true} {
		d := attach(t, s, r)
		swap(t, d, own.Path)
		if away {
			require.NoError(t, os.Rename(to.Path, to.Path+".away"))
		}
		now, err := s.Recall(t.Context(), to)
		if err != nil || now == nil || now.number != d.number || (now.File() == to.File.ID) == away {
			t.Errorf("away %t: %+v, %v", away, now, err)
		}
		detached(t, s, to)
		if left := over(t, own.Path); len(left) > 0 {
			t.Errorf("away %t: still attached: %q", away, left)
		}
	}
}

// What shows another device, and is published as nothing, may be the view of that one.
func TestViewOfAnotherDeviceIsNotTaken(t *testing.T) {
	s := newDevices(t)
	s.numbers.Published = func(string, bool) []state.DeviceNumber { return nil }
	was, now := state.DeviceNumber{Major: loopMajor, Minor: 1}, Device{name: "loop9", readOnly: true}
	now.info.Flags, now.info.Rdevice = unix.LO_FLAGS_READ_ONLY, unix.Mkdev(loopMajor, 2)
	copy(now.info.File_name[:], viewTag)
	if s.swapped(t.Context(), &now, was) {
		t.Error("the view of another device counts as swapped")
	}
}

// spoils is what a pod can do to the view that it has.
var spoils = map[string]func(t *testing.T, view *Device){
	"swapped": func(t *testing.T, view *Device) { swap(t, view, newFile(t, "own").Path) },
	"altered": func(t *testing.T, view *Device) {
		alter(t, view, func(info *unix.LoopInfo64) { info.Sizelimit = size / 2 })
	},
	"both": func(t *testing.T, view *Device) {
		swap(t, view, newFile(t, "own").Path)
		alter(t, view, func(info *unix.LoopInfo64) { info.Sizelimit = size / 2 })
	},
}

// Nor is a device that is another plugin's view by now, whatever a pod of that one has done to
// it: it would show that pod this volume.
func TestSpoiltViewOfAnotherPluginIsNotTaken(t *testing.T) {
	for name, spoil := range spoils {
		for _, published := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, published %t", name, published), func(t *testing.T) {
				before, other := newDevices(t), newDevices(t)
				to, theirs := newFile(t, "shown"), newFile(t, "theirs")
				d, their := attach(t, before, request(to, "vol")), attach(t, other, request(theirs, "theirs"))
				number, err := numberOf(addLoop(t, machine.FreeLoop(t)))
				require.NoError(t, err)
				publishAs(before, number, "vol", false)
				attach(t, before, viewRequest(d, "vol"))
				s := newDevices(t) // which knows the view
				detached(t, before, ViewOf(d.number))
				publishAs(other, number, "theirs", true)
				view := attach(t, other, viewRequest(their, "theirs"))
				if view.number != number {
					t.Fatalf("it is %v", view)
				}
				if published {
					publishAs(s, number, "vol", false)
				}
				spoil(t, view)
				if now, err := s.Recall(t.Context(), ViewOf(d.number)); now != nil || err != nil {
					t.Errorf("it is %v, %v", now, err)
				}
				if now, err := other.Recall(t.Context(), ViewOf(their.number)); err != nil || now == nil || now.number != number || now.over() != their.number || now.bytes != size {
					t.Errorf("the other plugin has %v, %v", now, err)
				}
			})
		}
	}
}

// A view that went late, when its last user closed it, leaves its number to that of another
// volume, which stays that one's, whatever a pod does to it.
func TestViewWithTheNumberOfAnEarlierOne(t *testing.T) {
	for name, spoil := range spoils {
		t.Run(name, func(t *testing.T) { testViewWithTheNumberOfAnEarlierOne(t, spoil) })
	}
}

func testViewWithTheNumberOfAnEarlierOne(t *testing.T, spoil func(*testing.T, *Device)) {
	s, first, second := newDevices(t), newFile(t, "first"), newFile(t, "second")
	over, to := attach(t, s, request(first, "first")), attach(t, s, request(second, "second"))
	name := addLoop(t, machine.FreeLoop(t))
	number, err := numberOf(name)
	require.NoError(t, err)
	publishAs(s, number, "first", true)
	early := viewRequest(over, "first")
	user, err := os.Open(attach(t, s, early).Path())
	require.NoError(t, err)
	wantError(t, s.Detach(t.Context(), early.Target), state.Unavailable, "when it is closed")
	require.NoError(t, user.Close())
	publishAs(s, number, "second", true)
	late := viewRequest(to, "second")
	view := attach(t, s, late)
	if view.number != number {
		t.Fatalf("it is %s", view)
	}
	spoil(t, view)
	detached(t, s, early.Target)
	if now, err := s.Recall(t.Context(), late.Target); err != nil || now == nil || now.number != number || now.over() != to.number {
		t.Errorf("it is %v, %v", now, err)
	}
	detached(t, s, late.Target)
}

// If a volume's view and what it was bound at were lost, another plugin may have the number,
// and shows a volume of its own.
func TestViewOfAnotherPluginIsNotTaken(t *testing.T) {
	other, s, theirs, mine := newDevices(t), newDevices(t), newFile(t, "theirs"), newFile(t, "mine")
	to := viewRequest(attach(t, other, request(theirs, "theirs")), "theirs")
	view := attach(t, other, to)
	publishAs(s, view.number, "mine", false)
	r := viewRequest(attach(t, s, request(mine, "mine")), "mine")
	if d := attach(t, s, r); d.number == view.number {
		t.Errorf("it is %s", d)
	}
	if now, err := other.Recall(t.Context(), to.Target); err != nil || now == nil || now.sequence != view.sequence {
		t.Errorf("the other plugin's is %v, %v", now, err)
	}
	detached(t, s, r.Target)
	detached(t, other, to.Target)
}
