package filesystem

import (
	"context"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	itsUUID     = "0f8fad5b-d9cb-469f-a165-70867728950e"
	anotherUUID = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
)

// A disk that keeps what is written passes and is blank afterwards; what holds anything is
// left as it is.
func TestTry(t *testing.T) {
	h := newHost(t)
	image := newImage(t, 64*mib)
	device := attach(t, image)
	must0(t, h.Try(t.Context(), device, itsUUID))
	must0(t, h.Prove(t.Context(), device))
	if c := probe(t, h, device, ""); c.Kind != state.ContentsBlank {
		t.Errorf("after the trial: %+v", c)
	}
	held := attach(t, newImage(t, 64*mib))
	hold := func() {
		defer claimed(t, held)()
		wantClass(t, h.Try(t.Context(), held, itsUUID), state.Unavailable, "mounted or claimed")
	}
	hold()
	for name, at := range map[string]int64{"its first byte": 0, "where the stamp ends": stampBytes - 1, "a superblock behind that": btrfsOffset + 0x40} {
		t.Run(name, func(t *testing.T) {
			image := newImage(t, 64*mib)
			write(t, image, at, []byte(btrfsUnmade))
			device := attach(t, image)
			unchanged(t, image, func() {
				if err := h.Try(t.Context(), device, itsUUID); !errors.As(err, new(*state.Unwritten)) {
					t.Errorf("tried: %v", err)
				}
			})
		})
	}
}

// claimed claims a device until the function that it returns is called.
func claimed(t *testing.T, device state.Device) (release func()) {
	t.Helper()
	d, err := open(device, unix.O_EXCL)
	must0(t, err)
	return func() { must0(t, d.Close()) }
}

// The stamp of a trial that was cut short is taken away, whole or in part, and nothing else is:
// the rest is read as that of any device.
func TestStampIsTakenAway(t *testing.T) {
	h := newHost(t)
	for name, c := range map[string]struct {
		sectors int
		data    string // behind it
		trial   string
		removed bool
		refused string
	}{
		"whole":              {sectors: 8, trial: itsUUID, removed: true},
		"torn":               {sectors: 3, trial: itsUUID, removed: true},
		"before data":        {sectors: 8, data: "somebody's", trial: itsUUID, removed: true, refused: "data at byte 5242880"},
		"of another trial":   {sectors: 8, trial: anotherUUID, refused: "stamp of a format that csi-node was about to begin at byte 0"},
		"of an unknown node": {sectors: 8, refused: "stamp of a format that csi-node was about to begin at byte 0"},
		"none":               {data: "somebody's", trial: itsUUID, refused: "data at byte 5242880"},
	} {
		t.Run(name, func(t *testing.T) {
			image := newImage(t, 16*mib)
			write(t, image, 0, stampOf(itsUUID)[:512*c.sectors])
			write(t, image, 5*mib, []byte(c.data))
			device := attach(t, image)
			device.Trial = c.trial
			if found := probe(t, h, device, ""); (found.Kind == state.ContentsUnproven) != c.removed {
				t.Errorf("found %+v", found)
			}
			err := h.Prove(t.Context(), device)
			if c.refused == "" {
				must0(t, err)
			} else {
				wantClass(t, err, state.FailedPrecondition, c.refused)
			}
			head := readAt(t, image, 0, stampBytes)
			if c.removed != isZero(head) && c.sectors > 0 {
				t.Errorf("the first bytes are %.40q", head)
			}
			if got := readAt(t, image, 5*mib, int64(len(c.data))); string(got) != c.data {
				t.Errorf("behind the stamp is %q", got)
			}
		})
	}
}

func readAt(t *testing.T, path string, offset, n int64) []byte {
	t.Helper()
	d, err := open(state.Device{Path: path}, 0)
	must0(t, err)
	defer d.Close()
	b, err := d.readAt(offset, n)
	must0(t, err)
	return b
}

// What a format leaves is told from what it did not make.
func TestOrigin(t *testing.T) {
	h := newHost(t)
	for name, c := range map[string]struct {
		make func(t *testing.T, device state.Device)
		want state.Origin
	}{
		"ext4":            {formatAs(h, "ext4"), state.OriginFormat},
		"xfs":             {formatAs(h, "xfs"), state.OriginFormat},
		"btrfs":           {formatAs(h, "btrfs"), state.OriginOther}, // whose UUID mkfs chooses
		"somebody's ext4": {func(t *testing.T, d state.Device) { command(t, "mkfs.ext4", "-q", d.Path) }, state.OriginOther},
		"swap":            {func(t *testing.T, d state.Device) { command(t, "mkswap", d.Path) }, state.OriginOther},
		"a stamp":         {func(t *testing.T, d state.Device) { write(t, d.Path, 0, stampOf(itsUUID)) }, state.OriginFormat},
		"another stamp":   {func(t *testing.T, d state.Device) { write(t, d.Path, 0, stampOf(anotherUUID)) }, state.OriginOther},
		"data":            {func(t *testing.T, d state.Device) { write(t, d.Path, mib, []byte("data")) }, state.OriginUnnamed},
		"half a btrfs":    {func(t *testing.T, d state.Device) { write(t, d.Path, btrfsOffset+0x40, []byte(btrfsUnmade)) }, state.OriginUnnamed},
		"half, and swap": {func(t *testing.T, d state.Device) {
			command(t, "mkswap", d.Path)
			write(t, d.Path, btrfsOffset+0x40, []byte(btrfsUnmade))
		}, state.OriginOther},
		"backup of a btrfs": {func(t *testing.T, d state.Device) { write(t, d.Path, btrfsMirrors[0]+0x40, []byte(btrfsMagic)) }, state.OriginOther},
		"a damaged ext4": {func(t *testing.T, d state.Device) {
			formatAs(h, "ext4")(t, d)
			write(t, d.Path, ext4Offset+0x3fc, []byte("sums"))
		}, state.OriginFormat},
		"an xfs that mkfs did not finish": {func(t *testing.T, d state.Device) {
			formatAs(h, "xfs")(t, d)
			write(t, d.Path, 126, []byte{1})
		}, state.OriginFormat},
		"a LUKS header":         {luksFormat(itsUUID), state.OriginFormat},
		"somebody's LUKS":       {luksFormat(anotherUUID), state.OriginOther},
		"the second of a layer": {func(t *testing.T, d state.Device) { luksFormat(itsUUID)(t, d); write(t, d.Path, 0, make([]byte, 4096)) }, state.OriginFormat},
	} {
		t.Run(name, func(t *testing.T) {
			device := attach(t, newImage(t, 320*mib))
			c.make(t, device)
			if got := probe(t, h, device, "").Origin; got != state.OriginUnknown {
				t.Errorf("without a mark: %s", got)
			}
			device.Formatting, device.FormatUUID = true, itsUUID
			if got := probe(t, h, device, ""); got.Origin != c.want {
				t.Errorf("it is of %s: %+v", got.Origin, got)
			}
		})
	}
}

func formatAs(h *Host, fsType string) func(*testing.T, state.Device) {
	return func(t *testing.T, device state.Device) {
		t.Helper()
		must0(t, h.Format(t.Context(), device, fsType, func(context.Context) (string, error) { return itsUUID, nil }))
	}
}

func luksFormat(uuid string) func(*testing.T, state.Device) {
	return func(t *testing.T, device state.Device) {
		t.Helper()
		cmd := exec.Command("cryptsetup", "luksFormat", "--batch-mode", "--type", "luks2", "--uuid", uuid, "--pbkdf", "pbkdf2", "--pbkdf-force-iterations", "1000", "--key-file", "-", device.Path)
		cmd.Stdin = strings.NewReader("a passphrase")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
}

// What comes last before mkfs comes after the proof, and mkfs only if that succeeds.
func TestFormatCallsLast(t *testing.T) {
	h, calls := newHost(t), 0
	boom := errors.New("boom")
	last := func(context.Context) (string, error) { calls++; return itsUUID, boom }
	data := newImage(t, 64*mib)
	write(t, data, 7*mib, []byte("data"))
	unchanged(t, data, func() {
		wantClass(t, h.Format(t.Context(), attach(t, data), "ext4", last), state.FailedPrecondition, "data at byte")
	})
	image := newImage(t, 64*mib)
	unchanged(t, image, func() {
		if err := h.Format(t.Context(), attach(t, image), "ext4", last); !errors.Is(err, boom) || calls != 1 {
			t.Errorf("%v after %d calls", err, calls)
		}
	})
}
