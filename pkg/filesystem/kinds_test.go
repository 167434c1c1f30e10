package filesystem

import (
	"bytes"
	"crypto/rand"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// verifiers are the programs that find nothing wrong with a sound file system,
// and change nothing.
var verifiers = map[string][]string{
	"ext4":  {"e2fsck", "-f", "-n"},
	"xfs":   {"xfs_repair", "-n"},
	"btrfs": {"btrfs", "check", "--readonly"},
}

const kindBytes = 320 * mib // suits every kind

// TestKinds holds each kind to what all of them must do.
func TestKinds(t *testing.T) {
	h := newHost(t)
	for _, k := range h.kinds {
		for name, behaves := range map[string]func(*testing.T, *Host, traits){
			"format":          formatsSoundly,
			"allocation":      keepsAllocation,
			"smallest":        tellsTheSmallest,
			"not blank":       refusesWhatIsNotBlank,
			"another kind":    refusesOtherKinds,
			"interrupted":     formatsAfterAnInterruption,
			"crash":           mountsAfterACrash,
			"grow mounted":    growsMounted,
			"grow unmounted":  growsUnmounted,
			"read-only probe": probesWithoutWriting,
		} {
			t.Run(k.traits().name+"/"+name, func(t *testing.T) { behaves(t, h, k.traits()) })
		}
	}
}

// formatted returns a device with a fresh file system of the kind.
func formatted(t testing.TB, h *Host, fsType string, size int64) state.Device {
	t.Helper()
	device := attach(t, newImage(t, size))
	must0(t, h.Format(t.Context(), device, fsType, nil))
	return device
}

func formatsSoundly(t *testing.T, h *Host, k traits) {
	device := formatted(t, h, k.name, kindBytes)
	want := state.Contents{
		Kind: state.ContentsFilesystem, FSType: k.name, Size: kindBytes, Found: k.name + " file system",
		UUID:         command(t, "blkid", "-p", "-o", "value", "-s", "UUID", device.Path),
		GrowsMounted: h.growsMounted[k.name], GrowsUnmounted: k.growsOffline,
	}
	if got := probe(t, h, device, ""); got != want {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	verify(t, device, k.name)
	dir := mount(t, device, k.name)
	if got := probe(t, h, device, dir); got != want {
		t.Errorf("mounted: got  %+v\nwant %+v", got, want)
	}
	unmount(t, dir)
	verify(t, device, k.name)
}

// A thick volume stays allocated and a thin one thin.
func keepsAllocation(t *testing.T, h *Host, k traits) {
	for _, thick := range []bool{true, false} {
		image := newImage(t, kindBytes)
		if thick {
			command(t, "fallocate", "--length", fmt.Sprint(kindBytes), image)
		}
		must0(t, h.Format(t.Context(), attach(t, image), k.name, nil))
		var st unix.Stat_t
		must0(t, unix.Stat(image, &st))
		allocated := st.Blocks * 512
		if thick && allocated < kindBytes || !thick && allocated > kindBytes/4 {
			t.Errorf("thick %t: %d bytes are allocated", thick, allocated)
		}
	}
}

func tellsTheSmallest(t *testing.T, h *Host, k traits) {
	if h.Smallest(k.name) != k.smallest {
		t.Errorf("smallest: %d, %d", h.Smallest(k.name), k.smallest)
	}
	small := attach(t, newImage(t, k.smallest-4096))
	unchanged(t, small.Backing, func() {
		wantClass(t, h.Format(t.Context(), small, k.name, nil), state.FailedPrecondition,
			fmt.Sprintf("the device has %d bytes, and %s needs at least %d", k.smallest-4096, k.name, k.smallest))
	})
	device := formatted(t, h, k.name, k.smallest)
	dir := mount(t, device, k.name)
	must0(t, os.WriteFile(filepath.Join(dir, "file"), make([]byte, mib/2), 0o600))
	if c := probe(t, h, device, dir); c.Growable || c.Size != k.smallest {
		t.Errorf("%+v", c)
	}
}

func refusesWhatIsNotBlank(t *testing.T, h *Host, k traits) {
	for _, other := range h.Types() {
		device := formatted(t, h, other, kindBytes)
		unchanged(t, device.Backing, func() {
			wantClass(t, h.Format(t.Context(), device, k.name, nil), state.FailedPrecondition, "found "+other+" file system")
		})
	}
	device := attach(t, newImage(t, kindBytes))
	write(t, device.Backing, kindBytes/2, []byte{1})
	unchanged(t, device.Backing, func() {
		wantClass(t, h.Format(t.Context(), device, k.name, nil), state.FailedPrecondition, fmt.Sprintf("found data at byte %d", int64(kindBytes/2)))
	})
}

func refusesOtherKinds(t *testing.T, h *Host, k traits) {
	device := formatted(t, h, k.name, kindBytes)
	unchanged(t, device.Backing, func() {
		for _, other := range h.Types() {
			if other != k.name {
				wantClass(t, h.Grow(t.Context(), device, other, ""), state.FailedPrecondition, "the "+other, "holds "+k.name+" file system")
				wantClass(t, h.Check(t.Context(), device, other), state.FailedPrecondition, "the "+other, "holds "+k.name+" file system")
			}
		}
		device.ReadOnly = true
		wantClass(t, h.Check(t.Context(), device, k.name), state.FailedPrecondition, "read-only")
	})
}

// What a mkfs that died leaves is neither blank nor a file system. Once it is
// erased, the device can be formatted.
func formatsAfterAnInterruption(t *testing.T, h *Host, k traits) {
	device := attach(t, newImage(t, kindBytes))
	mkfs := k.programs[0]
	t.Run("mkfs dies", func(t *testing.T) {
		path, err := exec.LookPath(mkfs)
		must0(t, err)
		// A process 1 ignores its own signals, so its child is the one that dies.
		script(t, mkfs, `for last; do :; done; `+path+` "$@" && dd if=/dev/zero of="$last" bs=68k count=1 conv=notrunc status=none; exit 137`)
		wantClass(t, h.Format(t.Context(), device, k.name, nil), state.Unavailable, mkfs+" failed with exit code 137")
	})
	c := probe(t, h, device, "")
	if c.Kind != state.ContentsOther {
		t.Errorf("after the interruption: %+v", c)
	}
	unchanged(t, device.Backing, func() {
		wantClass(t, h.Format(t.Context(), device, k.name, nil), state.FailedPrecondition, c.Found)
	})
	command(t, "blkdiscard", "--zeroout", device.Path)
	must0(t, h.Format(t.Context(), device, k.name, nil))
	verify(t, device, k.name)
}

// A file system whose machine died asks for no check: the mount replays its log.
func mountsAfterACrash(t *testing.T, h *Host, k traits) {
	crashed := attach(t, crash(t, formatted(t, h, k.name, kindBytes), k.name))
	if c := probe(t, h, crashed, ""); c.Kind != state.ContentsFilesystem || c.FSType != k.name || c.NeedsCheck {
		t.Errorf("%+v", c)
	}
	dir := mount(t, crashed, k.name)
	if b, err := os.ReadFile(filepath.Join(dir, "file")); string(b) != "data" {
		t.Errorf("%q, %v", b, err)
	}
	unmount(t, dir)
	verify(t, crashed, k.name)
}

// crash returns a copy of the file behind a device, made while the file system
// was mounted and had a file written and synced.
func crash(t testing.TB, device state.Device, fsType string) string {
	t.Helper()
	dir := mount(t, device, fsType)
	f, err := os.Create(filepath.Join(dir, "file"))
	must0(t, err)
	_, err = f.WriteString("data")
	must0(t, err)
	must0(t, f.Sync())
	image := newImage(t, 0)
	command(t, "cp", "--sparse=always", device.Backing, image)
	must0(t, f.Close())
	unmount(t, dir)
	return image
}

func growsMounted(t *testing.T, h *Host, k traits) {
	device := formatted(t, h, k.name, kindBytes)
	dir := mount(t, device, k.name)
	data := make([]byte, 8*mib)
	rand.Read(data)
	must0(t, os.WriteFile(filepath.Join(dir, "file"), data, 0o600))
	must0(t, h.Grow(t.Context(), device, k.name, dir)) // nothing to do
	device = resize(t, device, 2*kindBytes)
	before := probe(t, h, device, dir)
	if !before.Growable || before.Size != kindBytes {
		t.Errorf("before: %+v", before)
	}
	err := h.Grow(t.Context(), device, k.name, dir)
	if !before.GrowsMounted {
		wantClass(t, err, state.FailedPrecondition, "CAP_SYS_RESOURCE")
		return
	}
	must0(t, err)
	must0(t, h.Grow(t.Context(), device, k.name, dir)) // again
	if after := probe(t, h, device, dir); after.Growable || after.Size != 2*kindBytes {
		t.Errorf("after: %+v", after)
	}
	var st unix.Statfs_t
	must0(t, unix.Statfs(dir, &st))
	if total := int64(st.Blocks) * st.Frsize; total < kindBytes*3/2 {
		t.Errorf("users see %d bytes", total)
	}
	unmount(t, dir)
	if after := probe(t, h, device, ""); after.Growable || after.Size != 2*kindBytes {
		t.Errorf("unmounted: %+v", after)
	}
	verify(t, device, k.name)
	got, err := os.ReadFile(filepath.Join(mount(t, device, k.name), "file"))
	must0(t, err)
	if !bytes.Equal(got, data) {
		t.Error("the data has changed")
	}
}

func growsUnmounted(t *testing.T, h *Host, k traits) {
	device := formatted(t, h, k.name, kindBytes)
	must0(t, h.Grow(t.Context(), device, k.name, "")) // nothing to do
	device = resize(t, device, 2*kindBytes)
	if !k.growsOffline {
		unchanged(t, device.Backing, func() {
			wantClass(t, h.Grow(t.Context(), device, k.name, ""), state.FailedPrecondition, "only while it is mounted")
		})
		return
	}
	for range 2 {
		must0(t, h.Grow(t.Context(), device, k.name, ""))
	}
	if after := probe(t, h, device, ""); after.Growable || after.Size != 2*kindBytes || after.NeedsCheck {
		t.Errorf("after: %+v", after)
	}
	verify(t, device, k.name)
}

func probesWithoutWriting(t *testing.T, h *Host, k traits) {
	image := newImage(t, kindBytes)
	must0(t, h.Format(t.Context(), attach(t, image), k.name, nil))
	device := attach(t, image, "--read-only")
	device.ReadOnly = true
	unchanged(t, image, func() {
		if c := probe(t, h, device, ""); c.Kind != state.ContentsFilesystem || c.FSType != k.name {
			t.Errorf("%+v", c)
		}
	})
	device = resize(t, device, 2*kindBytes)
	device.ReadOnly = true
	unchanged(t, image, func() {
		wantClass(t, h.Grow(t.Context(), device, k.name, ""), state.FailedPrecondition, "read-only")
	})
}

func verify(t testing.TB, device state.Device, fsType string) {
	t.Helper()
	words := verifiers[fsType]
	command(t, words[0], append(words[1:], device.Path)...)
}
