package filesystem

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

// guardCase is one image and what Probe must say of it.
type guardCase struct {
	name  string
	size  int64 // 0: 16 MiB
	make  func(t *testing.T, image string)
	kind  state.ContentsKind
	found string // what Found must contain
}

func at(offset int64, b string) func(*testing.T, string) {
	return func(t *testing.T, image string) { write(t, image, offset, []byte(b)) }
}

func tool(name string, args ...string) func(*testing.T, string) {
	return func(t *testing.T, image string) { command(t, name, append(args, image)...) }
}

func both(fs ...func(*testing.T, string)) func(*testing.T, string) {
	return func(t *testing.T, image string) {
		for _, f := range fs {
			f(t, image)
		}
	}
}

func mbr() string {
	b := make([]byte, 512)
	copy(b[510:], bootMagic)
	copy(b[mbrEntries:], "\x80\x00\x00\x00\x83")
	binary.LittleEndian.PutUint32(b[mbrEntries+8:], 2048)
	binary.LittleEndian.PutUint32(b[mbrEntries+12:], 4096)
	return string(b)
}

func random(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	b[0], b[0x438%n] = 1, 1
	return string(b)
}

// mkfsBelow makes an ext4 that leaves the end of the device to others.
func mkfsBelow(t *testing.T, image string) {
	command(t, "mkfs.ext4", "-q", "-b", "4096", image, "2000")
}

var guardCases = []guardCase{
	{name: "holes", make: at(0, ""), kind: state.ContentsBlank},
	{name: "zeros", make: at(0, string(make([]byte, 3*mib))), kind: state.ContentsBlank},
	{name: "preallocated", make: tool("fallocate", "--length", "16MiB"), kind: state.ContentsBlank},
	{name: "an odd size", size: 16*mib + 512, make: at(0, ""), kind: state.ContentsBlank},

	{name: "ext4", make: tool("mkfs.ext4", "-q"), kind: state.ContentsFilesystem, found: "ext4 file system"},
	{name: "ext3", make: tool("mkfs.ext3", "-q"), kind: state.ContentsFilesystem, found: "ext3 file system"},
	{name: "ext2", make: tool("mkfs.ext2", "-q"), kind: state.ContentsFilesystem, found: "ext2 file system"},
	{name: "ext4 without journal", make: tool("mkfs.ext4", "-q", "-O", "^has_journal"), kind: state.ContentsFilesystem, found: "ext4 file system"},
	{name: "xfs", size: 300 * mib, make: tool("mkfs.xfs", "-q"), kind: state.ContentsFilesystem, found: "xfs file system"},
	{name: "old xfs", size: 300 * mib, make: tool("mkfs.xfs", "-q", "-m", "crc=0"), kind: state.ContentsFilesystem, found: "xfs file system"},
	{name: "ext4 behind boot code", make: both(tool("mkfs.ext4", "-q"), at(0, "\xeb\x3c\x90"), at(446, "\x13\x37 code"), at(510, bootMagic)), kind: state.ContentsFilesystem, found: "ext4"},
	{name: "ext4 with an old backup GPT", make: both(mkfsBelow, at(-512, gptMagic)), kind: state.ContentsFilesystem, found: "ext4"},
	{name: "ext4 with the magic of RAID inside a file", make: both(tool("mkfs.ext4", "-q"), at(-64<<10, mdMagic)), kind: state.ContentsFilesystem, found: "ext4"},

	{name: "ext4 with the magic of reiserfs inside a file", make: both(tool("mkfs.ext4", "-q"), at(64<<10+52, "ReIsErFs")), kind: state.ContentsFilesystem, found: "ext4"},
	{name: "ext4 with the magic of btrfs inside a file", make: both(tool("mkfs.ext4", "-q"), at(btrfsOffset+0x40, btrfsMagic)), kind: state.ContentsFilesystem, found: "ext4"},
	{name: "xfs with the magic of swap inside a file", size: 300 * mib, make: both(tool("mkfs.xfs", "-q"), at(64<<10-10, "SWAPSPACE2")), kind: state.ContentsFilesystem, found: "xfs"},

	{name: "swap", make: tool("mkswap", "-q"), kind: state.ContentsOther, found: "swap area at byte 4086"},
	{name: "external journal", make: tool("mke2fs", "-q", "-O", "journal_dev"), kind: state.ContentsOther, found: "external ext4 journal"},
	{name: "ext4 with an external journal", make: both(tool("mkfs.ext4", "-q"), tool("debugfs", "-w", "-R", "set_super_value journal_inum 0"), tool("debugfs", "-w", "-R", "set_super_value journal_dev 0x702")), kind: state.ContentsOther, found: "its journal on another device"},
	{name: "the magic of btrfs", make: at(btrfsOffset+0x40, btrfsMagic), kind: state.ContentsOther, found: "damaged btrfs superblock at byte 65536"},
	{name: "a btrfs being made", make: at(btrfsOffset+0x40, btrfsUnmade), kind: state.ContentsOther, found: "mkfs.btrfs did not finish at byte 65600"},
	{name: "vfat", make: both(at(0, "\xeb\x3c\x90mkfs.fat"), at(54, "FAT16   "), at(510, bootMagic)), kind: state.ContentsOther, found: "vfat file system"},
	{name: "ntfs", make: at(0, "\xeb\x52\x90NTFS    "), kind: state.ContentsOther, found: "ntfs file system"},
	{name: "iso9660", make: at(32<<10+1, "CD001"), kind: state.ContentsOther, found: "iso9660 file system"},
	{name: "zfs", make: at(16<<10, "\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"), kind: state.ContentsOther, found: "ZFS label"},
	{name: "GPT", make: both(at(0, mbr()), at(512, gptMagic), at(-512, gptMagic)), kind: state.ContentsOther, found: "GPT partition table at byte 512"},
	{name: "backup GPT", make: at(-512, gptMagic), kind: state.ContentsOther, found: "backup GPT partition table at byte 16776704"},
	{name: "backup GPT of 4 KiB sectors", make: at(-4096, gptMagic), kind: state.ContentsOther, found: "backup GPT partition table"},
	{name: "MBR", make: at(0, mbr()), kind: state.ContentsOther, found: "MBR partition table"},
	{name: "LUKS", make: at(0, "LUKS\xba\xbe\x00\x02"), kind: state.ContentsOther, found: "LUKS header at byte 0"},
	{name: "second LUKS2 header", make: at(16<<10, "SKUL\xba\xbe"), kind: state.ContentsOther, found: "second LUKS2 header at byte 16384"},
	{name: "second LUKS2 header far in", make: at(4<<20, "SKUL\xba\xbe"), kind: state.ContentsOther, found: "data at byte 4194304"},
	{name: "LVM", make: at(512, "LABELONE\x01"), kind: state.ContentsOther, found: "LVM2 physical volume at byte 512"},
	{name: "MD 0.90", make: at(-64<<10, mdMagic), kind: state.ContentsOther, found: "MD RAID 0.90"},
	{name: "MD 1.0", make: at(-8<<10, mdMagic), kind: state.ContentsOther, found: "MD RAID 1.0"},
	{name: "MD 1.1", make: at(0, mdMagic), kind: state.ContentsOther, found: "MD RAID 1.1"},
	{name: "MD 1.2", make: at(4096, mdMagic), kind: state.ContentsOther, found: "MD RAID 1.2"},
	{name: "bcache", make: at(4096+24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"), kind: state.ContentsOther, found: "bcache"},

	{name: "random bytes", make: at(0, random(16*mib)), kind: state.ContentsOther, found: ""},
	{name: "a byte at the start", make: at(0, "x"), kind: state.ContentsOther, found: "data at byte 0"},
	{name: "a byte in the middle", make: at(8*mib+77, "x"), kind: state.ContentsOther, found: "data at byte 8388685"},
	{name: "a high byte in the middle", make: at(8*mib+77, "\xff"), kind: state.ContentsOther, found: "data at byte 8388685"},
	{name: "the last byte", make: at(-1, "x"), kind: state.ContentsOther, found: "data at byte 16777215"},
	{name: "a byte in preallocated space", make: both(tool("fallocate", "--length", "16MiB"), at(5*mib, "x")), kind: state.ContentsOther, found: "data at byte 5242880"},

	{name: "damaged ext4", make: both(tool("mkfs.ext4", "-q"), at(1024+0x78, "x")), kind: state.ContentsOther, found: "damaged ext4 superblock at byte 1024: its checksum"},
	{name: "damaged ext2", make: both(tool("mkfs.ext2", "-q"), at(1024+0x28, "\xff\xff\xff")), kind: state.ContentsOther, found: "damaged ext4 superblock at byte 1024: it has groups of"},
	{name: "damaged xfs", size: 300 * mib, make: both(tool("mkfs.xfs", "-q"), at(108, "x")), kind: state.ContentsOther, found: "damaged xfs superblock at byte 0: its checksum"},
	{name: "the magic of xfs", make: at(0, xfsMagic), kind: state.ContentsOther, found: "damaged xfs superblock at byte 0"},
	{name: "ext4 under LVM", make: both(tool("mkfs.ext4", "-q"), at(512, "LABELONE")), kind: state.ContentsOther, found: "ext4 file system and LVM2"},
	{name: "ext4 under a partition table", make: both(tool("mkfs.ext4", "-q"), at(0, mbr())), kind: state.ContentsOther, found: "ext4 file system and MBR"},
	{name: "ext4 under RAID", make: both(mkfsBelow, at(-64<<10, mdMagic)), kind: state.ContentsOther, found: "ext4 file system and MD RAID 0.90"},
	{name: "xfs under swap", size: 300 * mib, make: both(tool("mkfs.xfs", "-q"), at(4086, "SWAPSPACE2")), kind: state.ContentsOther, found: "xfs file system and swap"},
	{name: "ext4 under DDF RAID", make: both(mkfsBelow, at(-512, "\xde\x11\xde\x11")), kind: state.ContentsOther, found: "ext4 file system and DDF RAID"},
	{name: "ext4 under Intel RAID", make: both(mkfsBelow, at(-1024, "Intel Raid ISM Cfg Sig. 1.3")), kind: state.ContentsOther, found: "ext4 file system and Intel RAID"},
	{name: "ext4 under Intel RAID with sectors of 4 KiB", make: both(mkfsBelow, at(-8192, "Intel Raid ISM Cfg Sig. 1.3")), kind: state.ContentsOther, found: "ext4 file system and Intel RAID"},
	{name: "ext4 under DRBD", make: both(mkfsBelow, at(-4096+60, "\x83\x74\x02\x6d")), kind: state.ContentsOther, found: "ext4 file system and DRBD"},
	{name: "ext4 under ZFS", make: both(tool("mkfs.ext4", "-q"), at(16<<10, "\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01")), kind: state.ContentsOther, found: "ext4 file system and ZFS label"},
	{name: "ext4 under UDF", make: both(tool("mkfs.ext4", "-q"), at(32<<10+1, "BEA01"), at(256*2048, "\x02\x00\x02\x00xxxxxxxx\x00\x01\x00\x00")), kind: state.ContentsOther, found: "ext4 file system and udf"},
	{name: "a partition table beside an older swap area", make: both(at(0, mbr()), at(4086, "SWAPSPACE2")), kind: state.ContentsOther, found: "swap area at byte 4086 and MBR"},
	{name: "ext4 cut short", make: func(t *testing.T, image string) {
		command(t, "mkfs.ext4", "-q", image)
		must0(t, os.Truncate(image, 12*mib))
	}, kind: state.ContentsOther, found: "of which the device has only 12582912"},
}

// TestGuard attempts to format every image, with and without knowing the file
// behind the device, and compares the image before and after.
func TestGuard(t *testing.T) {
	h := newHost(t)
	for _, c := range guardCases {
		for _, backed := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/backing=%t", c.name, backed), func(t *testing.T) {
				image := newImage(t, max(c.size, 16*mib*b2i(c.size == 0)))
				c.make(t, image)
				device := attach(t, image)
				if !backed {
					device.Backing = ""
				}
				got := probe(t, h, device, "")
				if got.Kind != c.kind || !strings.Contains(got.Found, c.found) || got.Found == "" {
					t.Errorf("found %s %q, want %s %q", got.Kind, got.Found, c.kind, c.found)
				}
				if c.kind == state.ContentsBlank {
					must0(t, h.Format(t.Context(), device, "ext4", nil))
					if got := probe(t, h, device, ""); got.Kind != state.ContentsFilesystem || got.FSType != "ext4" {
						t.Errorf("after Format: %+v", got)
					}
					return
				}
				unchanged(t, image, func() {
					wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, c.found, device.Path)
				})
			})
		}
	}
}

func b2i(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

func TestGuardShorterThanVolume(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 16*mib))
	device.Capacity += 50
	wantProbe(t, h, device, state.ContentsOther, "50 bytes shorter than the volume")
	wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, "50 bytes shorter")
}

// The file of a loop device that is cut short after the attach reads as an
// I/O error past its end, or as zeros: that depends on the kernel.
func TestGuardCutShort(t *testing.T) {
	h := newHost(t)
	for _, left := range []int64{0, 4 * mib} {
		for _, backed := range []bool{true, false} {
			device := attach(t, newImage(t, 16*mib))
			must0(t, os.Truncate(device.Backing, left))
			if !backed {
				device.Backing = ""
				if _, err := os.ReadFile(device.Path); err == nil {
					continue // nothing tells
				}
			}
			c := probe(t, h, device, "")
			told := strings.Contains(c.Found, "cannot be read: input/output error") ||
				backed && strings.Contains(c.Found, fmt.Sprintf("cut short by %d bytes", 16*mib-left))
			if c.Kind != state.ContentsOther || !told {
				t.Errorf("%d bytes left, backing %t: %+v", left, backed, c)
			}
			class := state.FailedPrecondition
			if strings.Contains(c.Found, "cannot be read") { // now
				class = state.Unavailable
			}
			err := h.Format(t.Context(), device, "ext4", nil)
			wantClass(t, err, class, c.Found)
			wantClass(t, h.Grow(t.Context(), device, "ext4", ""), class, c.Found)
			if c.Unreadable != (class == state.Unavailable) || !errors.As(err, new(*state.Unwritten)) {
				t.Errorf("%d bytes left, backing %t: %+v; %#v", left, backed, c, err)
			}
		}
	}
}

// Data that only the page cache of the device knows makes no extent yet in the
// file behind it.
func TestGuardSeesUnwrittenPages(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 64*mib))
	f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	must0(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("x"), 40*mib)
	must0(t, err)
	if c := probe(t, h, device, ""); c.Found != "data at byte 41943040" {
		t.Errorf("%+v", c)
	}
}

// A device that nobody is known to have had is not read if its file is one hole. It is
// otherwise, whatever is known.
func TestGuardOfAFreshDevice(t *testing.T) {
	h := newHost(t)
	fresh := func(image string) state.Device {
		device := attach(t, image)
		device.Fresh = true
		return device
	}
	device := fresh(newImage(t, 16*mib))
	wantProbe(t, h, device, state.ContentsBlank, "blank")
	must0(t, h.Prove(t.Context(), device))
	shorter := device
	shorter.Capacity += 50
	wantProbe(t, h, shorter, state.ContentsOther, "50 bytes shorter than the volume")
	f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
	must0(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("x"), 5*mib) // in the page cache
	must0(t, err)
	wantProbe(t, h, device, state.ContentsOther, "data at byte 5242880")
	wantClass(t, h.Prove(t.Context(), device), state.FailedPrecondition, "data at byte 5242880")
	wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, "data at byte 5242880")

	image := newImage(t, 16*mib)
	write(t, image, 0, []byte("x"))
	wantProbe(t, h, fresh(image), state.ContentsOther, "data at byte 0")
	image = newImage(t, 16*mib)
	command(t, "mkfs.ext4", "-q", image)
	wantProbe(t, h, fresh(image), state.ContentsFilesystem, "ext4")
}

// Holes are believed only of the file that is really behind the device.
func TestGuardChecksBacking(t *testing.T) {
	h := newHost(t)
	image := newImage(t, 16*mib)
	write(t, image, 9*mib, []byte("x"))
	for name, device := range map[string]state.Device{
		"another file": attach(t, image),
		"no file":      attach(t, image),
		"an offset":    attach(t, image, "--offset", "1048576"),
	} {
		where := "data at byte 9437184"
		switch name {
		case "another file":
			device.Backing = newImage(t, 16*mib)
		case "no file":
			device.Backing = filepath.Join(t.TempDir(), "gone")
		default:
			where = "data at byte 8388608"
		}
		if c := probe(t, h, device, ""); c.Found != where {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// Every byte that may be data is read before a format: a look says that it did
// not, and a proof finds what is anywhere.
func TestGuardReadsAll(t *testing.T) {
	const size, middle = 6 * lookLimit, 3 * lookLimit
	h := newHost(t)
	image := newImage(t, size)
	device := attach(t, image)
	command(t, "fallocate", "--length", strconv.Itoa(size), image)
	write(t, image, middle, []byte(random(600<<10)))
	if c := probe(t, h, device, ""); c.Found != fmt.Sprintf("data at byte %d", middle) {
		t.Errorf("data among unwritten extents: %+v", c)
	}
	device.Backing = "" // so that nothing tells where it is
	wantProbe(t, h, device, state.ContentsUnproven, "0.4 GiB that may be data")
	var told []string
	ctx := state.WithProgress(t.Context(), func(words string) { told = append(told, words) })
	unchanged(t, image, func() {
		wantClass(t, h.Prove(ctx, device), state.FailedPrecondition, fmt.Sprintf("data at byte %d", middle), device.Path)
		wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, fmt.Sprintf("data at byte %d", middle))
	})
	if len(told) == 0 || told[len(told)-1] != "proving that it is blank: 50 % of 384Mi read" {
		t.Errorf("told %d times, at last %q", len(told), told[max(len(told)-1, 0):])
	}
	command(t, "fallocate", "--zero-range", "--offset", strconv.Itoa(middle), "--length", "1MiB", image)
	write(t, image, size-1, []byte("x"))
	wantClass(t, h.Prove(t.Context(), device), state.FailedPrecondition, fmt.Sprintf("data at byte %d", size-1))
	write(t, image, size-1, []byte{0})
	must0(t, h.Prove(t.Context(), device))
	must0(t, h.Format(t.Context(), device, "ext4", nil))
}

// What is no local file may read as zeros for a while, and is read twice.
func TestGuardReadsTwice(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 16*mib))
	image := device.Backing
	for _, local := range []bool{true, false} {
		proofs := 0
		ctx := state.WithProgress(t.Context(), func(words string) {
			if strings.Contains(words, ": 0 % of ") {
				if proofs++; proofs == 2 {
					write(t, image, 9*mib, []byte("its data is back"))
				}
			}
		})
		if device.Backing = ""; local {
			device.Backing = image
			write(t, image, mib, make([]byte, 4096))
		}
		err := h.Prove(ctx, device)
		if local {
			must0(t, err)
		} else {
			wantClass(t, err, state.FailedPrecondition, "data at byte 9437184")
		}
		if want := map[bool]int{true: 1, false: 2}[local]; proofs != want {
			t.Errorf("local %t: %d proofs", local, proofs)
		}
	}
}

// What would take too long to read is refused, unless its past is known.
func TestGuardBound(t *testing.T) {
	h := newHost(t)
	image := newImage(t, ProveLimit+mib)
	device := attach(t, image)
	wantProbe(t, h, device, state.ContentsBlank, "")
	write(t, image, ProveLimit, []byte("x")) // where the file tells that it may be, however far
	wantProbe(t, h, device, state.ContentsOther, fmt.Sprintf("data at byte %d", ProveLimit))
	wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, fmt.Sprintf("data at byte %d", ProveLimit))
	command(t, "fallocate", "--punch-hole", "--offset", strconv.Itoa(ProveLimit), "--length", "1MiB", image)
	device.Backing = ""
	wantProbe(t, h, device, state.ContentsOther, "no more than 64.0 GiB are read")
	wantClass(t, h.Prove(t.Context(), device), state.FailedPrecondition, "no more than 64.0 GiB are read")
	marked := device
	marked.Formatting = true
	wantProbe(t, h, marked, state.ContentsUnproven, "")
	cleared := device
	cleared.WasCleared = true
	wantProbe(t, h, cleared, state.ContentsUnproven, "")
	write(t, image, 2*lookLimit, []byte("x"))
	wantClass(t, h.Prove(t.Context(), cleared), state.FailedPrecondition, fmt.Sprintf("data at byte %d", 2*lookLimit))
	command(t, "fallocate", "--punch-hole", "--offset", strconv.Itoa(2*lookLimit), "--length", "1MiB", image)
	device.Fresh = true
	wantProbe(t, h, device, state.ContentsBlank, "")
	must0(t, h.Prove(t.Context(), device))
	must0(t, h.Format(t.Context(), device, "ext4", nil))
	wantProbe(t, h, device, state.ContentsFilesystem, "")
}

// Whatever file system holds the volumes tells what was never written, and
// what was.
func TestGuardOnEveryPool(t *testing.T) {
	h := newHost(t)
	for _, fsType := range []string{"ext4", "xfs", "btrfs", "tmpfs"} {
		t.Run(fsType, func(t *testing.T) {
			dir := t.TempDir()
			if fsType == "tmpfs" {
				machine.Kernel(t)
				must0(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=200m"))
				t.Cleanup(func() { must0(t, machine.Unmount(dir)) })
			} else {
				dir = mount(t, formatted(t, h, fsType, 1<<30), fsType)
			}
			image := filepath.Join(dir, "data")
			command(t, "fallocate", "--length", "128MiB", image)
			device := attach(t, image)
			mayBeData := func() (total int64) {
				d, err := open(device, 0)
				must0(t, err)
				defer d.Close()
				must0(t, d.writeBack())
				must0(t, d.eachData(t.Context(), func(e extent) bool { total += e.end - e.start; return true }))
				return total
			}
			for range 2 { // what a look reads counts for nothing
				wantProbe(t, h, device, state.ContentsBlank, "")
			}
			if n := mayBeData(); n > mib {
				t.Errorf("%d bytes of what was never written may be data", n)
			}
			f, err := os.OpenFile(device.Path, os.O_RDWR, 0)
			must0(t, err)
			_, err = f.WriteAt([]byte(random(600<<10)), 77*mib)
			must0(t, err)
			must0(t, f.Close())
			if n := mayBeData(); n < 600<<10 || n > 8*mib {
				t.Errorf("%d bytes may be data", n)
			}
			if c := probe(t, h, device, ""); c.Found != fmt.Sprintf("data at byte %d", 77*mib) {
				t.Errorf("written: %+v", c)
			}
			wantClass(t, h.Format(t.Context(), device, "ext4", nil), state.FailedPrecondition, fmt.Sprintf("data at byte %d", 77*mib))
		})
	}
}

func TestGuardEndsWithContext(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 16*mib))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err := h.Probe(ctx, device, "")
	wantClass(t, err, state.Canceled)
	wantClass(t, h.Format(ctx, device, "ext4", nil), state.Canceled)
	d, err := open(device, 0)
	must0(t, err)
	defer d.Close()
	device.Backing = ""
	if _, err := proveBlank(ctx, d, ProveLimit); !errors.Is(err, context.Canceled) {
		t.Errorf("proveBlank: %v", err)
	}
	if _, err := d.firstData(ctx, mib); !errors.Is(err, context.Canceled) {
		t.Errorf("firstData: %v", err)
	}
	chunks := 0
	ctx, cancel = context.WithCancel(t.Context())
	ctx = state.WithProgress(ctx, func(string) { chunks++; cancel() })
	d.facts.Backing = "" // so that all is read
	if _, err := d.firstData(ctx, 16*mib); !errors.Is(err, context.Canceled) || chunks != 1 {
		t.Errorf("firstData read %d chunks after its end: %v", chunks, err)
	}
}

func TestProbeOpening(t *testing.T) {
	h := newHost(t)
	_, err := h.Probe(t.Context(), state.Device{}, "")
	wantClass(t, err, state.Unavailable, "no device node")
	_, err = h.Probe(t.Context(), state.Device{Path: filepath.Join(t.TempDir(), "gone")}, "")
	wantClass(t, err, state.Unavailable, "no such file")
	_, err = h.Probe(t.Context(), state.Device{Path: t.TempDir()}, "")
	wantClass(t, err, state.Unavailable, "no block device")
	device := attach(t, newImage(t, mib))
	device.Number.Minor += 1000
	_, err = h.Probe(t.Context(), device, "")
	wantClass(t, err, state.Unavailable, "is device")
}

func TestZero(t *testing.T) {
	b := make([]byte, 70000)
	if !isZero(b) || !isZero(nil) || !isZero(b[:1]) {
		t.Error("zeros are not zero")
	}
	for _, i := range []int{0, 1, 4095, 69998, 69999} {
		b[i] = 1
		if isZero(b) {
			t.Errorf("byte %d was missed", i)
		}
		b[i] = 0
	}
	for i := range b {
		b[i] = 7
	}
	if isZero(b) {
		t.Error("equal bytes are not zeros")
	}
}

func BenchmarkProve(b *testing.B) {
	h := newHost(b)
	image := newImage(b, 1<<30)
	command(b, "fallocate", "--length", "1GiB", image)
	device := attach(b, image)
	for _, backed := range []bool{true, false} {
		b.Run(fmt.Sprintf("backing=%t", backed), func(b *testing.B) {
			device := device
			if !backed {
				device.Backing = ""
			}
			b.SetBytes(1 << 30)
			for b.Loop() {
				must0(b, h.Prove(b.Context(), device))
			}
		})
	}
}

// A loop device that nothing backs any more has no bytes at all.
func TestGuardProof(t *testing.T) {
	empty, err := open(state.Device{Path: newImage(t, 0)}, 0)
	must0(t, err)
	defer empty.Close()
	if p, err := proveBlank(t.Context(), empty, ProveLimit); err != nil || !strings.Contains(p.found, "without any bytes") || p.blank() {
		t.Errorf("a device without bytes: %+v, %v", p, err)
	}

	image := newImage(t, 4*mib)
	write(t, image, 0, make([]byte, 4096))
	write(t, image, mib, make([]byte, 3*mib))
	d, err := open(state.Device{Path: image}, 0)
	must0(t, err)
	defer d.Close()
	var extents []extent
	err = d.eachData(t.Context(), func(e extent) bool { extents = append(extents, e); return e.start < mib })
	if err != nil || !slices.Equal(extents, []extent{{0, 4096}, {mib, 4 * mib}}) {
		t.Errorf("the data is %v (%v)", extents, err)
	}
}

// Neither zeros that the page cache remembers nor an error is a proof.
func TestGuardAsksTheDevice(t *testing.T) {
	h := newHost(t)
	device := attach(t, newImage(t, 16*mib))
	image := device.Backing
	device.Backing = ""
	held, err := open(device, 0) // the last close would drop the pages
	must0(t, err)
	defer held.Close()
	if c := probe(t, h, device, ""); c.Kind != state.ContentsBlank {
		t.Fatalf("blank: %+v", c)
	}
	write(t, image, 9*mib, []byte("x"))
	if c := probe(t, h, device, ""); c.Found != "data at byte 9437184" {
		t.Errorf("after a write beneath the device: %+v", c)
	}
	_, err = held.readAt(0, headSize) // zeros, which the cache keeps
	must0(t, err)
	command(t, "mkfs.ext4", "-q", "-F", image)
	wantProbe(t, h, device, state.ContentsFilesystem, "ext4")

	closed, err := open(device, 0)
	must0(t, err)
	must0(t, closed.Close())
	if found, err := closed.firstData(t.Context(), mib); err != nil || !found.failed || !strings.Contains(found.found, "cannot be read") {
		t.Errorf("a device that fails: %q, %v", found.found, err)
	}
	if _, _, other := newHost(t).recognise(closed); other == nil || !other.Unreadable || other.Kind != state.ContentsOther {
		t.Errorf("the head of a device that fails: %+v", other)
	}
	if p, err := proveBlank(t.Context(), closed, mib); err != nil || !p.failed || p.blank() {
		t.Errorf("the proof of a device that fails: %+v, %v", p, err)
	}
}
