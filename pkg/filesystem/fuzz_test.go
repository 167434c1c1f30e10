package filesystem

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// imageBytes is the size of the images whose heads are damaged.
const imageBytes = 512 * mib

// heads returns the first headSize bytes of real file systems: one of each kind
// that the Host makes, and older and odder ones of the same tools.
func heads(t testing.TB, h *Host) [][]byte {
	t.Helper()
	machine.Kernel(t)
	read := func(image string) []byte {
		f, err := os.Open(image)
		must0(t, err)
		head := make([]byte, headSize)
		_, err = io.ReadFull(f, head)
		must0(t, err)
		must0(t, f.Close())
		must0(t, os.Remove(image))
		return head
	}
	all := [][]byte{make([]byte, headSize)}
	for _, k := range h.kinds {
		d, err := open(state.Device{Path: newImage(t, imageBytes)}, 0)
		must0(t, err)
		must0(t, k.format(t.Context(), d, "", true))
		must0(t, d.Close())
		all = append(all, read(d.Name()))
	}
	for _, args := range []string{
		"mkfs.ext2 -q -b 1024", "mkfs.ext3 -q", "mkfs.ext4 -q -O bigalloc -C 65536", "mkfs.ext4 -q -O ^64bit,^metadata_csum -g 256 -b 1024",
		"mkfs.ext4 -q -O sparse_super2,^resize_inode", "mkfs.ext4 -q -r 0", "mkfs.xfs -q -m crc=0 -n ftype=1", "mkfs.xfs -q -s size=4096",
	} {
		image, words := newImage(t, imageBytes), strings.Fields(args)
		if out, err := exec.Command(words[0], append(words[1:], image)...).CombinedOutput(); err != nil {
			t.Logf("left out, as this version of %s does not make it: %s", words[0], out) // xfs of version 4
			must0(t, os.Remove(image))
			continue
		}
		all = append(all, read(image))
	}
	return all
}

// seals make a damaged superblock one whose checksum is right, so that what is
// read behind the checksum is tried, too.
var seals = []func(head []byte){
	func([]byte) {},
	func(head []byte) { // ext4, s_checksum
		b := head[ext4Offset:][:ext4Length]
		binary.LittleEndian.PutUint32(b[0x3fc:], ^crc32.Checksum(b[:0x3fc], castagnoli))
	},
	func(head []byte) { // xfs, sb_crc
		if sector := int(binary.BigEndian.Uint16(head[102:])); sector >= 512 && sector <= len(head) {
			binary.LittleEndian.PutUint32(head[224:], xfsChecksum(head[:sector]))
		}
	},
	func(head []byte) { // btrfs, csum of the rest of the 4 KiB
		b := head[64<<10:][:4<<10]
		binary.LittleEndian.PutUint32(b, crc32.Checksum(b[32:], castagnoli))
	},
}

// patch writes the edits into b: an offset of three bytes, a length of one, and
// so many bytes each.
func patch(b, edits []byte) {
	for len(edits) >= 4 {
		at, n := int(edits[0])|int(edits[1])<<8|int(edits[2])<<16, int(edits[3])
		n = min(n, len(edits)-4)
		copy(b[at%len(b):], edits[4:4+n])
		edits = edits[4+n:]
	}
}

// edit is one edit for patch.
func edit(at int, bytes string) []byte {
	return append([]byte{byte(at), byte(at >> 8), byte(at >> 16), byte(len(bytes))}, bytes...)
}

func addDamages(f *testing.F, heads int) {
	for base := range heads {
		for seal := range seals {
			f.Add(uint8(base), uint8(seal), []byte{}, int64(2*imageBytes))
		}
	}
	const top = "\xff\xff\xff\xff"
	for _, edits := range [][]byte{
		edit(ext4Offset+0x4, top), edit(ext4Offset+0x18, "\x06"), edit(ext4Offset+0x20, "\x01\x00\x00\x00"), edit(ext4Offset+0x28, "\x01\x00\x00\x00"),
		edit(ext4Offset+0x58, "\x80\x00"), edit(ext4Offset+0x60, top), edit(ext4Offset+0x64, top), edit(ext4Offset+0xce, top), edit(ext4Offset+0x150, top), edit(ext4Offset+0xfe, top),
	} {
		f.Add(uint8(1), uint8(1), edits, int64(1)<<59)
	}
	for _, edits := range [][]byte{edit(4, top), edit(8, top+top), edit(84, top), edit(88, top), edit(84, "\x00\x00\x00\x40"), edit(100, "\xb4\xa4"), edit(102, "\x80\x00")} {
		f.Add(uint8(2), uint8(2), edits, int64(1)<<59)
	}
	for _, s := range headTable {
		f.Add(uint8(0), uint8(0), edit(s.offset, s.magic), int64(imageBytes))
	}
}

// FuzzSuperblock damages the heads of real file systems. Whatever is still taken for
// one has sane sizes and grows within its device, and never shrinks.
func FuzzSuperblock(f *testing.F) {
	h := newHost(f)
	bases := heads(f, h)
	addDamages(f, len(bases))
	f.Fuzz(func(t *testing.T, base, seal uint8, edits []byte, deviceBytes int64) {
		head := bytes.Clone(bases[int(base)%len(bases)])
		patch(head, edits)
		seals[int(seal)%len(seals)](head)
		if deviceBytes < 0 || deviceBytes > mostBytes {
			return
		}
		for _, k := range h.kinds {
			for _, part := range [][]byte{head, head[:min(len(head), int(deviceBytes))]} {
				checkParse(t, k, part, deviceBytes)
			}
		}
	})
}

func checkParse(t *testing.T, k kind, head []byte, deviceBytes int64) {
	t.Helper()
	name := k.traits().name
	sb, err := k.parse(head)
	switch {
	case err != nil && !strings.Contains(err.Error(), name):
		t.Errorf("the error does not name %s: %v", name, err)
	case err != nil && sb != nil:
		t.Errorf("a superblock and an error: %+v, %v", sb, err)
	case sb == nil || err != nil:
		return
	case sb.fsType == "":
		t.Errorf("a superblock without a type: %+v", sb)
	case sb.bytes <= 0 || sb.bytes > mostBytes:
		t.Errorf("%s of %d bytes", sb.fsType, sb.bytes)
	}
	largest := int64(0)
	for _, size := range []int64{0, 1, sb.bytes - 1, sb.bytes, sb.bytes + 4095, deviceBytes / 2, deviceBytes - 1, deviceBytes} {
		switch grown := sb.grown(size); {
		case grown < sb.bytes:
			t.Errorf("%s of %d bytes shrinks to %d on a device of %d", sb.fsType, sb.bytes, grown, size)
		case grown > sb.bytes && grown > size:
			t.Errorf("%s of %d bytes grows to %d on a device of %d", sb.fsType, sb.bytes, grown, size)
		case sb.grown(grown) != grown && grown > sb.bytes:
			t.Errorf("%s of %d bytes grows to %d on a device of %d, and to %d on one of that size", sb.fsType, sb.bytes, grown, size, sb.grown(grown))
		}
	}
	// A larger device never yields less, unless the tool refuses it altogether.
	sizes := []int64{sb.bytes, deviceBytes / 3, deviceBytes / 2, deviceBytes}
	slices.Sort(sizes)
	for _, size := range sizes {
		grown := sb.grown(size)
		if grown < largest && grown != sb.bytes {
			t.Errorf("%s of %d bytes grows to %d on a device of %d, and to %d on a smaller one", sb.fsType, sb.bytes, grown, size, largest)
		}
		largest = max(largest, grown)
	}
}

// FuzzProbe damages the head and the tail of a device and probes it. A device
// with any byte that is not zero is never blank; one with a known signature is
// told by it; what is taken for a file system lies on its device.
func FuzzProbe(f *testing.F) {
	h := newHost(f)
	bases := heads(f, h)
	f.Add(uint8(0), uint8(0), []byte{}, []byte{}, uint32(imageBytes))
	f.Add(uint8(0), uint8(0), []byte{}, edit(0, "\x00"), uint32(1))
	f.Add(uint8(1), uint8(0), []byte{}, edit(0, mdMagic), uint32(imageBytes))
	f.Add(uint8(2), uint8(0), edit(512, gptMagic), edit(60<<10, mdMagic), uint32(imageBytes+512))
	f.Add(uint8(1), uint8(0), edit(510, bootMagic), []byte{}, uint32(imageBytes-4096))
	for _, s := range headTable {
		f.Add(uint8(0), uint8(0), edit(s.offset, s.magic), []byte{}, uint32(s.offset+len(s.magic)))
	}
	f.Fuzz(func(t *testing.T, base, seal uint8, headEdits, tailEdits []byte, size uint32) {
		deviceBytes := int64(size) % (2 * imageBytes)
		head, tail := bytes.Clone(bases[int(base)%len(bases)]), make([]byte, 128<<10)
		patch(head, headEdits)
		seals[int(seal)%len(seals)](head)
		patch(tail, tailEdits)
		k, sb, found, damaged := h.parse(head)
		if k == nil && len(found)+len(damaged) == 0 {
			deviceBytes %= 4 * mib // all of it will be read
		}
		path := memory(t, deviceBytes, head, tail)
		c, err := h.Probe(t.Context(), state.Device{Path: path}, "")
		must0(t, err)
		b := content(t, path)
		head = b[:min(len(b), headSize)]
		signatures, _ := headSignatures(head, sb)
		switch {
		case c.Kind == state.ContentsBlank && (len(b) == 0 || !isZero(b)):
			t.Errorf("blank, with something on it: %+v", c)
		case c.Kind != state.ContentsBlank && len(b) > 0 && isZero(b):
			t.Errorf("nothing is on it, and it is not blank: %+v", c)
		case c.Kind == state.ContentsFilesystem && (len(signatures) > 0 || c.Size <= 0 || c.Size > deviceBytes || c.FSType == "" || c.UUID == ""):
			t.Errorf("%+v, on a device of %d bytes with %q", c, deviceBytes, signatures)
		case c.Kind == state.ContentsOther && c.Found == "":
			t.Errorf("nobody knows what: %+v", c)
		case c.Kind == state.ContentsUnread:
			t.Errorf("%+v", c)
		}
		for _, s := range signatures {
			if !strings.Contains(c.Found, s) {
				t.Errorf("%q does not tell of the %s", c.Found, s)
			}
		}
	})
}

// memory is a file of so many bytes that holds the head and, towards its end,
// the tail; it goes with the test.
func memory(t *testing.T, bytes int64, head, tail []byte) string {
	t.Helper()
	fd, err := unix.MemfdCreate("fuzz", unix.MFD_CLOEXEC)
	must0(t, err)
	f := os.NewFile(uintptr(fd), "fuzz")
	t.Cleanup(func() { must0(t, f.Close()) })
	tailAt := max(bytes-int64(len(tail)), 0)
	if !isZero(tail) {
		_, err = f.WriteAt(tail, tailAt)
		must0(t, err)
	}
	if !isZero(head) {
		_, err = f.WriteAt(head, 0)
		must0(t, err)
	}
	must0(t, f.Truncate(bytes))
	return fmt.Sprintf("/proc/self/fd/%d", fd)
}

// content returns the bytes of a sparse file, without its holes but for one
// zero in the place of each.
func content(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	must0(t, err)
	defer f.Close()
	info, err := f.Stat()
	must0(t, err)
	var all []byte
	for _, e := range dataOf(t, f, info.Size()) {
		if e.start > int64(len(all)) {
			all = append(all, make([]byte, min(e.start-int64(len(all)), headSize))...)
		}
		b := make([]byte, e.end-e.start)
		_, err := f.ReadAt(b, e.start)
		must0(t, err)
		all = append(all, b...)
	}
	if len(all) < headSize {
		all = append(all, make([]byte, min(info.Size()-int64(len(all)), headSize))...)
	}
	return all
}

// What libblkid finds on a device is never called blank, and what both take for
// a file system they take for the same.
func TestProbeAgreesWithBlkid(t *testing.T) {
	machine.Kernel(t)
	h := newHost(t)
	agree := func(what string, head []byte, inFile string) {
		t.Helper()
		image := newImage(t, imageBytes)
		write(t, image, 0, head)
		out, err := exec.Command("blkid", "-p", "-o", "value", "-s", "TYPE", image).Output()
		if code := (*exec.ExitError)(nil); err != nil && !errors.As(err, &code) {
			t.Fatal(err)
		}
		blkid, c := strings.TrimSpace(string(out)), probe(t, h, state.Device{Path: image}, "")
		if inFile != "" && c.FSType == inFile && c.Kind == state.ContentsFilesystem {
			blkid = inFile
		}
		if c.Kind == state.ContentsBlank && !isZero(head) || c.Kind == state.ContentsFilesystem && c.FSType != blkid || inFile != "" && c.Kind != state.ContentsFilesystem {
			t.Errorf("%s: blkid says %q, Probe %+v", what, blkid, c)
		}
		must0(t, os.Remove(image))
	}
	bases := heads(t, h)
	for i, head := range bases {
		agree(fmt.Sprintf("base %d", i), head, "")
		_, sb, _, _ := h.parse(head)
		for _, s := range headTable {
			both, inFile := bytes.Clone(head), ""
			copy(both[s.offset:], s.magic)
			if sb != nil && s.offset >= sb.own && !isOwner(s.name) { // it may be a user's
				inFile = sb.fsType
			}
			agree(fmt.Sprintf("base %d and a %s at %d", i, s.name, s.offset), both, inFile)
		}
	}
}
