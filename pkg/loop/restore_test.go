package loop

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
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
