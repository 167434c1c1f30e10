package filesystem

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// mkfsBtrfs returns the file of a fresh btrfs.
func mkfsBtrfs(t testing.TB, options ...string) string {
	t.Helper()
	image := newImage(t, 128*mib)
	machine.Mkfs(t, "btrfs", append(append([]string{"-q"}, options...), image)...)
	return image
}

// seal gives a changed superblock a checksum that is right.
func seal(head []byte) {
	b := head[btrfsOffset:]
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[0x20:], castagnoli))
}

func TestParseBtrfs(t *testing.T) {
	image := mkfsBtrfs(t, "--csum", "crc32c")
	le := binary.LittleEndian
	for name, c := range map[string]struct {
		change func(b []byte)
		want   string // in the error; "" for none
	}{
		"as made":         {func([]byte) {}, ""},
		"relocating":      {func(b []byte) { b[0x38] |= btrfsRelocate }, ""},
		"seeding":         {func(b []byte) { le.PutUint64(b[0x38:], btrfsWritten|btrfsSeeding) }, "seed for others"},
		"an error":        {func(b []byte) { b[0x38] |= 4 }, "its flags 0x5"},
		"three devices":   {func(b []byte) { b[0x88] = 3 }, "one of the 3 devices"},
		"no device":       {func(b []byte) { b[0x88] = 0 }, "no device"},
		"a mirror":        {func(b []byte) { le.PutUint64(b[0x30:], 64*mib) }, "the one of byte 67108864"},
		"another's":       {func(b []byte) { b[0x11b]++ }, "of another btrfs"},
		"a new UUID":      {func(b []byte) { b[0x20]++; copy(b[0x23b:], b[0x11b:][:16]); b[0xbd] |= btrfsUUIDApart >> 8 }, ""},
		"a new UUID only": {func(b []byte) { b[0x20]++ }, "of another btrfs"},
		"sectors of zero": {func(b []byte) { le.PutUint32(b[0x90:], 0) }, "sector size is 0"},
		"odd sectors":     {func(b []byte) { le.PutUint32(b[0x90:], 4097) }, "sector size is 4097"},
		"no bytes":        {func(b []byte) { le.PutUint64(b[0xd1:], 0) }, "spans 0 bytes"},
		"too many bytes":  {func(b []byte) { le.PutUint64(b[0xd1:], 1<<63) }, "spans 9223372036854775808 bytes"},
		"xxhash64":        {func(b []byte) { b[0xc4] = 1 }, "type xxhash64, which the plugin cannot verify"},
		"sha256, wrongly": {func(b []byte) { b[0xc4] = 2 }, "its checksum is wrong"},
		"blake2b":         {func(b []byte) { b[0xc4] = 3 }, "type blake2b, which"},
		"unknown":         {func(b []byte) { b[0xc4] = 4 }, "unknown type 4"},
	} {
		head := readHead(t, image)
		c.change(head[btrfsOffset:])
		seal(head)
		s, err := parseBtrfs(head)
		if c.want == "" && (err != nil || s == nil || s.bytes != 128*mib || s.sector != 4096) {
			t.Errorf("%s: %+v, %v", name, s, err)
		}
		if c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	head := readHead(t, image)
	head[btrfsOffset+0x300]++
	if _, err := parseBtrfs(head); err == nil || !strings.Contains(err.Error(), "damaged btrfs superblock at byte 65536: its checksum is wrong") {
		t.Errorf("one byte changed: %v", err)
	}
	if s, err := parseBtrfs(head[:headSize-1]); s != nil || err != nil {
		t.Errorf("a short device: %+v, %v", s, err)
	}
}

// The four kinds of checksum, as mkfs.btrfs makes them.
func TestProbeBtrfsChecksums(t *testing.T) {
	h := newHost(t)
	for kind, want := range map[string]state.ContentsKind{
		"crc32c": state.ContentsFilesystem, "sha256": state.ContentsFilesystem,
		"xxhash": state.ContentsOther, "blake2": state.ContentsOther,
	} {
		device := state.Device{Path: mkfsBtrfs(t, "--csum", kind)}
		if c := probe(t, h, device, ""); c.Kind != want {
			t.Errorf("%s: %+v", kind, c)
		}
	}
}

// What only a tool of btrfs can make.
func TestProbeOtherBtrfs(t *testing.T) {
	h := newHost(t)
	first, second := newImage(t, 128*mib), newImage(t, 128*mib)
	machine.Mkfs(t, "btrfs", "-q", first, second)
	for _, image := range []string{first, second} {
		device := attach(t, image)
		wantProbe(t, h, device, state.ContentsOther, "one of the 2 devices of a btrfs")
		unchanged(t, image, func() {
			wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, "one of the 2 devices of a btrfs")
		})
	}
	seed := mkfsBtrfs(t)
	command(t, "btrfstune", "-S", "1", seed)
	if c := probe(t, h, state.Device{Path: seed}, ""); c.Kind != state.ContentsOther || !strings.Contains(c.Found, "seed") {
		t.Errorf("a seed: %+v", c)
	}
	renamed := mkfsBtrfs(t)
	before := probe(t, h, state.Device{Path: renamed}, "")
	command(t, "btrfstune", "-m", renamed)
	uuid := command(t, "blkid", "-p", "-o", "value", "-s", "UUID", renamed)
	if c := probe(t, h, state.Device{Path: renamed}, ""); c.Kind != state.ContentsFilesystem || c.UUID != uuid || c.UUID == before.UUID {
		t.Errorf("renamed from %s to %s: %+v", before.UUID, uuid, c)
	}
}

// A btrfs whose first superblock is gone can be brought back from a mirror, so
// its device is not blank, however large it is.
func TestGuardFindsBtrfsMirrors(t *testing.T) {
	h := newHost(t)
	image := newImage(t, 300<<30)
	machine.Mkfs(t, "btrfs", "-q", "-K", image)
	for _, backed := range []bool{true, false} {
		device := attach(t, image)
		if !backed {
			device.Backing = ""
		}
		wantProbe(t, h, device, state.ContentsFilesystem, "")
	}
	mirror := make([]byte, btrfsLength)
	f, err := os.Open(image)
	must0(t, err)
	defer f.Close()
	_, err = f.ReadAt(mirror, 256<<30)
	must0(t, err)
	for _, offset := range btrfsMirrors {
		alone := newImage(t, 300<<30)
		write(t, alone, offset, mirror)
		device := attach(t, alone)
		want := fmt.Sprintf("copy of a btrfs superblock at byte %d", offset)
		if c := probe(t, h, device, ""); c.Kind != state.ContentsOther || c.Found != want {
			t.Errorf("%+v, want %q", c, want)
		}
		wantClass(t, h.Format(t.Context(), device, "btrfs", nil), state.FailedPrecondition, want)
		write(t, alone, offset+0x40, make([]byte, len(btrfsMagic))) // the places are read even when the magic is gone
		if c := probe(t, h, device, ""); c.Kind != state.ContentsOther || !strings.HasPrefix(c.Found, "data at byte ") {
			t.Errorf("without its magic: %+v", c)
		}
	}
}

// What the kernel says of a mounted btrfs is about its device and no other.
func TestBtrfsWrongMountpoint(t *testing.T) {
	h := newHost(t)
	one, other := formatted(t, h, "btrfs", 256*mib), formatted(t, h, "btrfs", 256*mib)
	dir := mount(t, one, "btrfs")
	_, err := h.Probe(t.Context(), other, dir)
	wantClass(t, err, state.Unavailable, "is on device "+one.Number.String()+", not "+other.Number.String())
	_, err = h.Probe(t.Context(), one, t.TempDir())
	wantClass(t, err, state.Unavailable, "BTRFS_IOC_FS_INFO")
}

// Nobody gets a btrfs without asking for it.
func TestDefault(t *testing.T) {
	h := newHost(t)
	for _, capable := range []bool{true, false} {
		h.growsMounted["ext4"] = capable
		for bytes, blind := range map[int64]string{64 * mib: "ext4", 256 * mib: "ext4", 300 * mib: "xfs", 1 << 40: "xfs"} {
			want := "ext4"
			if !capable {
				want = blind
			}
			if got := h.Default(bytes); got != want {
				t.Errorf("CAP_SYS_RESOURCE %t, %d bytes: %s, want %s", capable, bytes, got, want)
			}
		}
	}
}

func TestCheckBtrfs(t *testing.T) {
	h := newHost(t)
	wantClass(t, h.Check(t.Context(), formatted(t, h, "btrfs", 256*mib), "btrfs"), state.FailedPrecondition, "btrfs scrub", "btrfs check")
}

// While a btrfs works, its superblock changes under Probe's eyes.
func TestProbeBusyBtrfs(t *testing.T) {
	h := newHost(t)
	device := formatted(t, h, "btrfs", 256*mib)
	dir := mount(t, device, "btrfs")
	root, err := os.Open(dir)
	must0(t, err)
	defer root.Close()
	probesBusy(t, h, device, dir, 1000, func(i int) error {
		if err := os.WriteFile(fmt.Sprintf("%s/file%d", dir, i%7), nil, 0o600); err != nil {
			return err
		}
		return unix.Syncfs(int(root.Fd())) // commits, and so writes superblocks
	})
}

// mkfs.btrfs fails when another loop device of the node goes as it looks at all of
// them; one that always fails so is not run for ever.
func TestFormatBtrfsBesideDevicesThatGo(t *testing.T) {
	device := attach(t, newImage(t, btrfsSmallest))
	real, err := exec.LookPath("mkfs.btrfs")
	must0(t, err)
	runs := filepath.Join(t.TempDir(), "runs")
	const fails = "echo x >>%s; [ $(wc -l <%[1]s) -gt %d ] || { echo 'ERROR: cannot check mount status of x: No such device or address' >&2; exit 1; }; exec %s \"$@\""
	script(t, "mkfs.btrfs", fmt.Sprintf(fails, runs, 1000, real))
	wantClass(t, newHost(t).Format(t.Context(), device, "btrfs", nil), state.Unavailable, "cannot check mount status")
	text, err := os.ReadFile(runs)
	must0(t, err)
	if got := strings.Count(string(text), "x"); got != btrfsTries {
		t.Errorf("it was run %d times", got)
	}
	script(t, "mkfs.btrfs", fmt.Sprintf(fails, runs, btrfsTries+1, real))
	must0(t, newHost(t).Format(t.Context(), device, "btrfs", nil))
}
