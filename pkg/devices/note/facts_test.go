package note

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/filesystem"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

var wantError = require.Class

// newDevice attaches a device whose backend tells no identity.
func newDevice(t *testing.T) (d state.Device, file string) {
	t.Helper()
	machine.Kernel(t)
	file = filepath.Join(t.TempDir(), "disk")
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("junk", 1<<20)), 0o600))
	node := machine.Losetup(t, file)
	info, err := blockdev.Look(node)
	require.NoError(t, err)
	return state.Device{State: state.DeviceAttached, Path: node, Number: info.Number, Size: info.Size}, file
}

// newIdentified is newDevice, with what the kernel says that the device is.
func newIdentified(t *testing.T) (d state.Device, file string) {
	t.Helper()
	d, file = newDevice(t)
	info, err := blockdev.Look(d.Path)
	require.NoError(t, err)
	d.Identity = info.Identity()
	return d, file
}

func open(t *testing.T, dir string) *Facts {
	t.Helper()
	f, err := Open(dir)
	require.NoError(t, err)
	return f
}

func (f *Facts) told(v devices.Volume, d state.Device) state.Device {
	f.Tell(v, &d)
	return d
}

// The mark of a device that tells nothing of what it is holds for that device only,
// and what forbids a format for good.
func TestDeviceWithoutIdentity(t *testing.T) {
	lib := t.TempDir()
	f, v := open(t, lib), devices.Volume{ID: "v", Backend: "b"}
	d, file := newDevice(t)
	require.NoError(t, f.BeginFormat(t.Context(), v, d))
	if now := open(t, lib).told(v, d); !now.Formatting || now.Err != nil {
		t.Errorf("%+v", now)
	}
	rebooted := open(t, lib)
	rebooted.boot = "another"
	machine.LosetupDetach(t, d.Path)
	machine.Command(t, "losetup", d.Path, file)
	for name, f := range map[string]*Facts{"another boot": rebooted, "another device with its number": f} {
		t.Run(name, func(t *testing.T) {
			now := f.told(v, d)
			wantError(t, now.Err, state.FailedPrecondition, d.Path, f.dir.Path("volume b v"))
			wantError(t, f.Erase(t.Context(), v, now), state.FailedPrecondition, "not erased")
			wantError(t, f.BeginFormat(t.Context(), v, d), state.FailedPrecondition, "not erased")
			if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw), "junk") {
				t.Errorf("%.10q, %v", raw, err)
			}
		})
	}
	absent := d
	absent.State = state.DeviceAbsent
	if err := f.Clear(t.Context(), v, absent, func() error { return nil }); err != nil { // an operator's word
		t.Fatal(err)
	}
	if now := f.told(v, d); now.Formatting || now.Fresh || now.Err != nil {
		t.Errorf("cleared: %+v", now)
	}
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4")))
	if now := rebooted.told(v, d); now.Formatted != "ext4" || now.Err != nil {
		t.Errorf("formatted: %+v", now)
	}
}

// Of a device that tells nothing of what it is, the file system that was made on it is known.
func TestMadeOnADeviceWithoutIdentity(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newDevice(t)
	for _, test := range []struct {
		fsType string
		known  bool
	}{{"ext4", true}, {"xfs", true}, {"btrfs", false}, {"luks2", false}} { // the last two do not bear the UUID of the format, or not alone
		t.Run(test.fsType, func(t *testing.T) {
			trial, err := f.TryFormat(t.Context(), v, d)
			require.NoError(t, err)
			require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, test.fsType)))
			if now := f.told(v, d); now.Formatted != test.fsType || (now.MadeUUID == trial) != test.known || !test.known && now.MadeUUID != "" {
				t.Errorf("after the trial %s: %+v", trial, now)
			}
			require.NoError(t, f.EndFormat(t.Context(), v, d, test.fsType)) // again
			if now := f.told(v, d); (now.MadeUUID == trial) != test.known {
				t.Errorf("ended again: %+v", now)
			}
			require.NoError(t, f.Clear(t.Context(), v, d, func() error { return nil }))
			if now := f.told(v, d); now.MadeUUID != "" {
				t.Errorf("cleared: %+v", now)
			}
		})
	}
	d.Identity = "wwid:naa.60"
	_, err := f.TryFormat(t.Context(), v, d)
	require.NoError(t, errors.Join(err, f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4")))
	if now := f.told(v, d); now.MadeUUID != "" {
		t.Errorf("it has an identity: %+v", now)
	}
}

// What is noted of a device without an identity holds for one at its path that tells one: it may
// be the same, or another, which is told from it by the file system that was made.
func TestDeviceTellsAnIdentityLater(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newDevice(t)
	trial, err := f.TryFormat(t.Context(), v, d)
	require.NoError(t, errors.Join(err, f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4"), f.BeginRaw(t.Context(), v, d)))
	later := d
	later.Identity = "serial:1"
	if now := f.told(v, later); now.Formatted != "ext4" || now.MadeUUID != trial || now.Raw || now.Formatting || now.Err != nil {
		t.Errorf("%+v", now)
	}
	wantError(t, f.BeginFormat(t.Context(), v, later), state.FailedPrecondition, "formatted as ext4 before")
	if now := f.told(devices.Volume{ID: "w", Backend: "b"}, later); now.Formatted != "" || now.Raw {
		t.Errorf("another volume's: %+v", now)
	}
	require.NoError(t, f.Clear(t.Context(), v, later, func() error { return nil }))
	if now := f.told(v, later); now.Formatted != "" || now.MadeUUID != "" || now.Raw {
		t.Errorf("cleared: %+v", now)
	}
	require.NoError(t, f.BeginFormat(t.Context(), v, later))

	other, _ := newDevice(t)
	w := devices.Volume{ID: "w", Backend: "b"}
	require.NoError(t, f.BeginFormat(t.Context(), w, other)) // and not ended
	other.Identity = "serial:2"
	if now := f.told(w, other); now.Formatting || now.Err != nil {
		t.Errorf("a mark is of one device only: %+v", now)
	}
}

// A device that another has replaced is neither erased nor noted of.
func TestFactsFollowTheDevice(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newIdentified(t)
	require.NoError(t, f.BeginFormat(t.Context(), v, d))
	w := devices.Volume{ID: "w", Backend: "other"} // the same device by another name
	if now := f.told(w, d); !now.Formatting {
		t.Errorf("%+v", now)
	}
	other, file := newDevice(t)
	swapped := f.told(v, d)
	swapped.Path, swapped.Number = other.Path, other.Number
	if err := f.Erase(t.Context(), v, swapped); err == nil || !strings.Contains(err.Error(), d.Identity) {
		t.Errorf("another device is erased: %v", err)
	}
	if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw), "junk") {
		t.Errorf("%.10q, %v", raw, err)
	}
	for _, change := range []func(*state.Device){
		func(d *state.Device) { d.ReadOnly = true },
		func(d *state.Device) { d.State = state.DeviceAbsent },
	} {
		changed := f.told(v, d)
		change(&changed)
		wantError(t, f.Erase(t.Context(), v, changed), state.FailedPrecondition, "not attached for writing")
		wantError(t, f.BeginRaw(t.Context(), v, changed), state.FailedPrecondition, "not attached for writing")
	}
	require.NoError(t, f.Erase(t.Context(), v, f.told(v, d)))
}

// A device that got the number while an erasure waited for the end of a claim is not erased, though
// neither tells what it is.
func TestEraseOfANumberThatIsAnotherDevice(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newDevice(t)
	require.NoError(t, f.BeginFormat(t.Context(), v, d))
	told := f.told(v, d)
	_, file := newDevice(t)
	machine.LosetupDetach(t, d.Path)
	machine.Command(t, "losetup", d.Path, file)
	t.Cleanup(func() { machine.LosetupDetach(t, d.Path) })
	require.Words(t, f.Erase(t.Context(), v, told), d.Path, "another device")
	if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw), "junk") {
		t.Errorf("%.10q, %v", raw, err)
	}
}

// A device that a program which is being started has open for a moment is erased all the same.
func TestEraseWaitsForProgramsBeingStarted(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newDevice(t)
	require.NoError(t, f.BeginFormat(t.Context(), v, d))
	now := f.told(v, d)
	inherited, err := os.OpenFile(d.Path, os.O_RDONLY|unix.O_EXCL, 0)
	require.NoError(t, err)
	syscall.ForkLock.Lock() // as from a fork to its exec
	erased := make(chan error, 1)
	go func() { erased <- f.Erase(t.Context(), v, now) }()
	time.Sleep(100 * time.Millisecond)
	err = inherited.Close()
	syscall.ForkLock.Unlock()
	require.NoError(t, errors.Join(err, <-erased))
}

// A damaged note stops formats, and is told as what cannot be known.
func TestDamagedFacts(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newDevice(t)
	d.Identity = "wwid:naa.60"
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "xfs")))
	path := f.dir.Path("device wwid:naa.60")
	require.NoError(t, os.Truncate(path, 20))
	now := f.told(v, d)
	wantError(t, now.Err, state.Internal, path)
	if !now.Attached() {
		t.Errorf("it cannot be taken down: %+v", now)
	}
	wantError(t, f.BeginFormat(t.Context(), v, d), state.Internal, path)
	wantError(t, f.BeginRaw(t.Context(), v, d), state.Internal, path)
	wantError(t, f.Erase(t.Context(), v, now), state.Internal, path)
	wantError(t, f.Clear(t.Context(), v, d, func() error { return nil }), state.Internal, path)
}

// What pods have written to a disk means nothing to the node, until the note is removed.
func TestDiskThatWasARawVolume(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newIdentified(t)
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "xfs")))
	require.NoError(t, f.Raw(d.Number))
	require.NoError(t, f.BeginRaw(t.Context(), v, d))
	path := f.dir.Path("device " + d.Identity)
	if err := f.Raw(d.Number); err == nil || !strings.Contains(err.Error(), "the raw block volume v") || !strings.Contains(err.Error(), path) {
		t.Error(err)
	}
	require.NoError(t, os.Truncate(path, 20))
	wantError(t, f.Raw(d.Number), state.Internal, path)
	require.NoError(t, os.Remove(path))
	require.NoError(t, f.Raw(d.Number))
	if err := f.Raw(state.DeviceNumber{Major: 4000}); err == nil {
		t.Error("no error for a device that is not there")
	}
}

// What was cleared is believed to be blank only where it is too large to be read, and while
// nobody can have had it elsewhere.
func TestClearedDevice(t *testing.T) {
	d, file := newDevice(t)
	require.NoError(t, os.Truncate(file, filesystem.ProveLimit+1<<20)) // a hole
	replug := func() {
		t.Helper()
		machine.LosetupDetach(t, d.Path)
		machine.Command(t, "losetup", d.Path, file)
		info, err := blockdev.Look(d.Path)
		require.NoError(t, err)
		d.Size, d.Identity = info.Size, info.Identity()
	}
	replug()
	lib, v := t.TempDir(), devices.Volume{ID: "v", Backend: "b"}
	f := open(t, lib)
	absent := state.Device{State: state.DeviceAbsent, Backing: d.Path, Identity: d.Identity, Size: d.Size}
	clear := func() {
		t.Helper()
		require.NoError(t, f.Clear(t.Context(), v, absent, func() error { return nil }))
		if !open(t, lib).told(v, d).Fresh {
			t.Fatal("a device that was cleared just now is not believed to be blank")
		}
	}
	for name, since := range map[string]func() state.Device{
		"it can be read": func() state.Device { small := d; small.Size = filesystem.ProveLimit; return small },
		"unplugged":      func() state.Device { replug(); return d },
		"rebooted":       func() state.Device { f.boot = "another"; return d },
		"used raw":       func() state.Device { require.NoError(t, f.BeginRaw(t.Context(), v, d)); return d },
		"formatted":      func() state.Device { require.NoError(t, f.BeginFormat(t.Context(), v, d)); return d },
		"not attached":   func() state.Device { return absent },
	} {
		t.Run(name, func(t *testing.T) {
			f = open(t, lib)
			clear()
			if now := f.told(v, since()); now.Fresh || now.Err != nil {
				t.Errorf("%+v", now)
			}
		})
	}
}

// A device that was cleared, and claimed by somebody before it was formatted, is to be proved blank.
func TestClearedDeviceWhoseFormatIsGivenUp(t *testing.T) {
	d, file := newDevice(t)
	require.NoError(t, os.Truncate(file, filesystem.ProveLimit+1<<20)) // a hole
	machine.LosetupDetach(t, d.Path)
	machine.Command(t, "losetup", d.Path, file)
	info, err := blockdev.Look(d.Path)
	require.NoError(t, err)
	d.Size, d.Identity = info.Size, info.Identity()
	v := devices.Volume{ID: "v", Backend: "b"}
	absent := state.Device{State: state.DeviceAbsent, Backing: d.Path, Identity: d.Identity, Size: d.Size}
	for name, c := range map[string]struct {
		then func(*Facts) error
		was  bool
	}{
		"looked at again": {func(f *Facts) error { return nil }, true},
		"given up again": {func(f *Facts) error {
			return errors.Join(f.BeginFormat(t.Context(), v, d), f.AbandonFormat(t.Context(), v, d))
		}, true},
		"cleared anew": {func(f *Facts) error { return f.Clear(t.Context(), v, absent, func() error { return nil }) }, false},
		"used raw":     {func(f *Facts) error { return f.BeginRaw(t.Context(), v, d) }, false},
		"another boot": {func(f *Facts) error { f.boot = "another"; return nil }, false},
		"formatted at last": {func(f *Facts) error {
			return errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4"))
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := open(t, t.TempDir())
			require.NoError(t, errors.Join(f.Clear(t.Context(), v, absent, func() error { return nil }), f.BeginFormat(t.Context(), v, d), f.AbandonFormat(t.Context(), v, d)))
			if now := f.told(v, d); now.Fresh || !now.WasCleared {
				t.Errorf("given up: %+v", now)
			}
			require.NoError(t, c.then(f))
			if now := f.told(v, d); now.WasCleared != c.was || now.Fresh != (name == "cleared anew") {
				t.Errorf("%+v", now)
			}
		})
	}
}

// A clearing that has failed erases the device later only if it may have written to it.
func TestClearingThatWroteNothing(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newIdentified(t)
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4"), f.BeginRaw(t.Context(), v, d)))
	detached := d
	detached.State = state.DeviceAbsent
	refused := &state.Unwritten{Err: state.Errorf(state.FailedPrecondition, "it is in use")}
	for _, test := range []struct {
		name string
		err  error
		mark bool
	}{{"nothing was written", refused, false}, {"something may have been written", errors.New("EIO"), true}} {
		t.Run(test.name, func(t *testing.T) {
			err := f.Clear(t.Context(), v, detached, func() error {
				if !f.told(v, d).Formatting {
					t.Error("it is zeroed without a mark")
				}
				return test.err
			})
			if !errors.Is(err, test.err) {
				t.Error(err)
			}
			if now := f.told(v, d); now.Formatting != test.mark || (now.Formatted == "ext4") == test.mark || now.Raw == test.mark || now.Err != nil {
				t.Errorf("%+v", now)
			}
		})
	}
}

// A mark that is not known to be durable may be there: it is taken back, as nothing is zeroed then.
func TestClearingThatCouldNotBegin(t *testing.T) {
	f, v := open(t, t.TempDir()), devices.Volume{ID: "v", Backend: "b"}
	d, _ := newIdentified(t)
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4")))
	sync, lost := f.sync, errors.New("the sync failed")
	f.sync = func(directory string) error {
		f.sync = sync
		return lost
	}
	err := f.Clear(t.Context(), v, d, func() error {
		t.Error("it is zeroed")
		return nil
	})
	if !errors.Is(err, lost) {
		t.Error(err)
	}
	if now := f.told(v, d); now.Formatting || now.Formatted != "ext4" || now.Err != nil {
		t.Errorf("%+v", now)
	}
}

// A format of which nothing is on the device is forgotten, and nothing there is erased.
func TestAbandonedFormat(t *testing.T) {
	d, _ := newDevice(t)
	lib, v := t.TempDir(), devices.Volume{ID: "v", Backend: "b"}
	f := open(t, lib)
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.AbandonFormat(t.Context(), v, d)))
	now := open(t, lib).told(v, d)
	if now.Formatting || now.StaleMark || now.Formatted != "" || now.Err != nil {
		t.Errorf("%+v", now)
	}
	wantError(t, f.Erase(t.Context(), v, now), state.FailedPrecondition, "may be data")
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4"), f.AbandonFormat(t.Context(), v, d)))
	if now := f.told(v, d); now.Formatted != "ext4" {
		t.Errorf("a format that ended: %+v", now)
	}
}

// The mark of a format lets nothing be erased that others may have written since.
func TestStaleMark(t *testing.T) {
	d, file := newIdentified(t)
	lib, v := t.TempDir(), devices.Volume{ID: "v", Backend: "b"}
	require.NoError(t, open(t, lib).BeginFormat(t.Context(), v, d))
	if now := open(t, lib).told(v, d); !now.Formatting || now.StaleMark || now.Err != nil {
		t.Errorf("just now: %+v", now)
	}
	rebooted := open(t, lib)
	rebooted.boot = "another"
	stale := func(name string, f *Facts) {
		t.Helper()
		now := f.told(v, d)
		if !now.Formatting || !now.StaleMark || now.Err != nil {
			t.Errorf("%s: %+v", name, now)
		}
		wantError(t, f.Erase(t.Context(), v, now), state.FailedPrecondition, "may be data")
	}
	stale("rebooted", rebooted)
	machine.LosetupDetach(t, d.Path)
	machine.Command(t, "losetup", d.Path, file)
	stale("unplugged", open(t, lib))
}

// A trial is no mark, and its UUID is that of the mark which comes after it.
func TestTrial(t *testing.T) {
	d, file := newIdentified(t)
	lib, v := t.TempDir(), devices.Volume{ID: "v", Backend: "b"}
	f := open(t, lib)
	told := func(formatting bool, uuid, trial string) {
		t.Helper()
		if now := open(t, lib).told(v, d); now.Formatting != formatting || now.FormatUUID != uuid || now.Trial != trial || !now.Noted || now.Err != nil {
			t.Errorf("%+v", now)
		}
		old := struct{ Formatting bool }{} // what an earlier version knows
		if _, err := f.dir.Read(keyOf(v, d), &old); err != nil || old.Formatting != formatting {
			t.Errorf("an earlier version sees the mark %t, %v", old.Formatting, err)
		}
	}
	begin := func() (uuid string) {
		t.Helper()
		uuid, err := f.TryFormat(t.Context(), v, d)
		require.NoError(t, err)
		told(false, "", uuid)
		wantError(t, f.Erase(t.Context(), v, f.told(v, d)), state.FailedPrecondition, "may be data")
		return uuid
	}
	first := begin()
	uuid := begin()
	if first == uuid {
		t.Error("two trials have one UUID")
	}
	for range 2 {
		require.NoError(t, f.BeginFormat(t.Context(), v, d))
		told(true, uuid, "")
	}
	require.NoError(t, f.AbandonFormat(t.Context(), v, d))
	told(false, "", "")
	uuid = begin()
	require.NoError(t, f.AbandonFormat(t.Context(), v, d))
	told(false, "", uuid) // its stamp may turn up
	require.NoError(t, f.BeginFormat(t.Context(), v, d))
	begin() // again, after what was left was erased
	require.NoError(t, errors.Join(f.BeginFormat(t.Context(), v, d), f.EndFormat(t.Context(), v, d, "ext4")))
	told(false, "", "")
	if _, err := f.TryFormat(t.Context(), v, d); state.ClassOf(err) != state.FailedPrecondition {
		t.Errorf("tried after a format: %v", err)
	}
	if raw, err := os.ReadFile(file); err != nil || !strings.HasPrefix(string(raw), "junk") {
		t.Errorf("%.10q, %v", raw, err)
	}

	cleared := d
	cleared.State = state.DeviceAbsent
	require.NoError(t, f.Clear(t.Context(), v, cleared, func() error { told(true, "", ""); return nil }))
	begin()
	require.NoError(t, f.BeginRaw(t.Context(), v, d))
	told(false, "", "")

	// An earlier version has begun it: its mark lets anything be erased.
	require.NoError(t, f.dir.Write(keyOf(v, d), fact{Volume: "v", Formatting: true}))
	told(true, "", "")
}

// What is made with the id, or on the device, of a volume that was deleted is new. A note of another
// volume, which has the device by now, stays.
func TestForget(t *testing.T) {
	for name, newDevice := range map[string]func(*testing.T) (state.Device, string){"identity": newIdentified, "none": newDevice} {
		t.Run(name, func(t *testing.T) {
			f, ctx := open(t, t.TempDir()), t.Context()
			d, _ := newDevice(t)
			v, other := devices.Volume{ID: "v", Backend: "b"}, devices.Volume{ID: "other", Backend: "b"}
			require.NoError(t, f.BeginFormat(ctx, v, d))
			require.NoError(t, f.EndFormat(ctx, v, d, "ext4"))
			if d.Identity != "" {
				require.NoError(t, f.Forget(ctx, other, d))
			}
			if got := f.told(v, d).Formatted; got != "ext4" {
				t.Errorf("noted is %q", got)
			}
			for range 2 {
				require.NoError(t, f.Forget(ctx, v, d))
			}
			if got := f.told(v, d).Formatted; got != "" {
				t.Errorf("still noted is %q", got)
			}
			require.NoError(t, f.dir.Each(func(key string, _ func(any) error) error {
				t.Errorf("the note %s is left", key)
				return nil
			}))
		})
	}
}
