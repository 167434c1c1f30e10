package loop

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// The tags of today's and yesterday's version are the same: a device that one
// attached is the other's.
func TestTag(t *testing.T) {
	long := strings.Repeat("a", 127)
	sum := sha256.Sum256([]byte(long))
	for name, want := range map[string]string{
		"pvc-1": "csi-node:0a1b2c3d:pvc-1",
		long:    "csi-node:0a1b2c3d:" + strings.Repeat("a", 24) + "~" + hex.EncodeToString(sum[:10]),
	} {
		if got := Tag("0a1b2c3d", name); got != want || len(got) > 63 {
			t.Errorf("the tag of %s is %q, want %q", name, got, want)
		}
	}
}

// A file that a lease proves to be nobody's is not shown by a device that does not
// answer, though that has the same name in another place; one whose data was
// deleted may be, and without a file only the name tells.
func TestSilentDeviceOfAnotherPlace(t *testing.T) {
	dir := t.TempDir()
	replace(t, &sysBlock, dir)
	put(t, filepath.Join(dir, "loop1", "loop", "backing_file"), "/one/volumes/vol/data\n")
	put(t, filepath.Join(dir, "loop2", "loop", "backing_file"), "/two/volumes/vol/data (deleted)\n")
	put(t, filepath.Join(dir, "loop3", "loop", "backing_file"), "/two/volumes/other/data\n")
	path := filepath.Join(t.TempDir(), "volumes", "vol", "data")
	put(t, path, "")
	file, err := StatFile(path)
	require.NoError(t, err)
	silent := []string{"loop1", "loop2", "loop3"}
	to := Target{Tag: Tag("place", "vol"), Path: path, File: file, Place: "/volumes/vol/"}
	if !to.nobodyHasItOpen() {
		t.Fatal("no lease proves that nobody has the file")
	}
	mustBe := func(want ...string) {
		t.Helper()
		maybe := to.candidates(silent)
		if len(maybe) != len(want) {
			t.Fatalf("it may be %q, want %q", maybe, want)
		}
		for i := range want {
			if !strings.HasPrefix(maybe[i], "/dev/"+want[i]+" ") {
				t.Errorf("it may be %q, want %q", maybe, want)
			}
		}
	}
	mustBe("loop2")
	reader, err := os.Open(path)
	require.NoError(t, err)
	defer reader.Close()
	mustBe("loop1", "loop2", "loop3")
	to.File = nil
	mustBe("loop1", "loop2")
}

// A device that another one shows is not lost by a detach that is refused, nor
// does it refuse discards less than before.
func TestRefusedDetachKeepsTheDevice(t *testing.T) {
	s, to := newDevices(t), newFile(t, "stacked")
	r := request(to, "vol")
	r.Solid = true
	d := attach(t, s, r)
	above := machine.Losetup(t, d.Path())
	wantError(t, s.Detach(t.Context(), to), state.Unavailable, d.Path(), above)
	if now, err := s.Recall(t.Context(), to); err != nil || now == nil || now.Detaching() || now.sequence != d.sequence || !discardDisabled(d.name) {
		t.Errorf("after the refusal: %+v, %v", now, err)
	}
	machine.LosetupDetach(t, above)
	detached(t, s, to)
	if err := recreate(d.name); err != nil && !lostRace(err) {
		t.Error(err)
	}
}

// A process that was killed may attach a file once more, which no index knows.
func TestDetachTakesEveryDeviceOfTheTag(t *testing.T) {
	s, to := newDevices(t), newFile(t, "twice")
	attach(t, s, request(to, "vol"))
	backing, err := os.OpenFile(to.Path, os.O_RDWR, 0)
	require.NoError(t, err)
	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: 512}
	copy(config.Info.File_name[:tagSize], to.Tag)
	name := addLoop(t, machine.FreeLoop(t))
	if taken, err := s.bind(t.Context(), name, backing, &config, Shape{Sector: 512}, false, func(*os.File) (bool, error) { return false, nil }); taken || err != nil {
		t.Fatal(taken, err)
	}
	require.NoError(t, backing.Close())
	detached(t, s, to)
	if left := over(t, to.Path); len(left) > 0 {
		t.Errorf("still attached: %q", left)
	}
}

// A device over a file that was replaced since is not gone because nobody has the new one open.
func TestDetachOfADeviceOverAnEarlierFile(t *testing.T) {
	s, to := newDevices(t), newFile(t, "earlier")
	d := attach(t, s, request(to, "vol"))
	require.NoError(t, os.Rename(to.Path, to.Path+".earlier"))
	put(t, to.Path, "")
	var err error
	to.File, err = StatFile(to.Path)
	require.NoError(t, err)
	opened, err := open(d.name, os.O_RDONLY)
	require.NoError(t, err)
	wantError(t, s.Detach(t.Context(), to), state.Unavailable, d.Path(), errHeld.Error())
	require.NoError(t, opened.Close())
	detached(t, s, to)
}

// Programs claim a device for a moment, and leave it alone then.
func TestDetachWaitsOutAClaim(t *testing.T) {
	s, to := newDevices(t), newFile(t, "data")
	d := attach(t, s, request(to, "vol"))
	f, err := open(d.name, os.O_RDONLY|unix.O_EXCL)
	require.NoError(t, err)
	closed := make(chan error, 1)
	time.AfterFunc(goneLimit/20, func() { closed <- f.Close() })
	detached(t, s, to)
	require.NoError(t, <-closed)
}

// Who had a number before does not claim the device that has it now, and is told
// that its own is gone.
func TestDetachOfANumberThatIsAnothers(t *testing.T) {
	s := newDevices(t)
	name := addLoop(t, machine.FreeLoop(t))
	node := filepath.Join("/dev", name)
	bind := func(to Target) *Device {
		machine.Command(t, "losetup", node, to.Path)
		d, err := ask(name)
		if err != nil || d == nil {
			t.Fatalf("%v, %v", d, err)
		}
		return d
	}
	d := bind(newFile(t, "data"))
	machine.LosetupDetach(t, node)
	bind(newFile(t, "other"))
	defer machine.LosetupDetach(t, node)
	f, err := open(d.name, os.O_RDONLY|unix.O_EXCL)
	require.NoError(t, err)
	defer f.Close()
	_, err = s.release(t.Context(), d, Target{})
	require.NoError(t, err)
}

// A device is believed to be the one of a name only if it says so itself.
func TestAskByNode(t *testing.T) {
	newDevices(t)
	bind := func(file string) (name string, want *Device) {
		t.Helper()
		name = addLoop(t, machine.FreeLoop(t))
		if d := askByNode(name, "/dev/"+name, describe); d != nil {
			t.Errorf("not bound: %s", d)
		}
		machine.Command(t, "losetup", "/dev/"+name, newFile(t, file).Path)
		t.Cleanup(func() { machine.LosetupDetach(t, "/dev/"+name) })
		want, err := ask(name)
		require.NoError(t, err)
		return name, want
	}
	name, want := bind("data")
	other, _ := bind("other")
	if d := askByNode(name, "/dev/"+name, describe); d == nil || *d != *want {
		t.Errorf("%+v, want %+v", d, want)
	}
	file, link := filepath.Join(t.TempDir(), "file"), filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	require.NoError(t, os.Symlink("/dev/"+name, link))
	for what, path := range map[string]string{"nothing": file + "2", "a file": file, "a link": link, "the node of another device": "/dev/" + other} {
		if d := askByNode(name, path, describe); d != nil {
			t.Errorf("%s: %+v", what, d)
		}
	}
}

func TestTagged(t *testing.T) {
	s, to := newDevices(t), newFile(t, "tagged")
	d := attach(t, s, request(to, "vol"))
	prefix := strings.TrimSuffix(to.Tag, "tagged")
	for _, s := range []*Devices{s, newDevices(t)} {
		if s.Seen(to.Tag) != d.name {
			t.Errorf("%s was not seen", d)
		}
		all, err := s.Tagged(t.Context(), prefix, func(string) bool { return false })
		if err != nil || len(all) != 1 || all[0].Number() != d.Number() {
			t.Errorf("%v, %v", all, err)
		}
		if all, err := s.Tagged(t.Context(), prefix, func(tag string) bool { return tag == to.Tag }); err != nil || len(all) != 0 {
			t.Errorf("%v, %v", all, err)
		}
	}
	detached(t, s, to)
}
