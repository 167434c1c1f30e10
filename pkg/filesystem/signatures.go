package filesystem

import (
	"bytes"
	"encoding/binary"
	"fmt"
)

// signature is a magic number at a fixed place.
type signature struct {
	name   string
	fsType string // of a file system
	offset int
	magic  string
}

// headTable lists what is looked for in the first headSize bytes, apart from
// the kinds' own superblocks. Offsets and magics are those of libblkid
// (util-linux, libblkid/src/superblocks and partitions).
var headTable = []signature{
	{"LUKS header", "", 0, "LUKS\xba\xbe"},
	{"second LUKS2 header", "", 16 << 10, "SKUL\xba\xbe"},
	{"second LUKS2 header", "", 32 << 10, "SKUL\xba\xbe"},
	{"second LUKS2 header", "", 64 << 10, "SKUL\xba\xbe"},
	{"LVM2 physical volume", "", 0, "LABELONE"},
	{"LVM2 physical volume", "", 512, "LABELONE"},
	{"LVM2 physical volume", "", 1024, "LABELONE"},
	{"LVM2 physical volume", "", 1536, "LABELONE"},
	{"MD RAID 1.1 superblock", "", 0, mdMagic},
	{"MD RAID 1.2 superblock", "", 4096, mdMagic},
	{"GPT partition table", "", 512, gptMagic},
	{"GPT partition table", "", 4096, gptMagic},
	{"bcache superblock", "", 4096 + 24, "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"},
	{"bcachefs file system", "bcachefs", 4096 + 24, "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"},
	{"VDO header", "", 0, "dmvdo001"},
	{"Ceph BlueStore device", "", 0, "bluestore block device"},
	{"BitLocker volume", "", 3, "-FVE-FS-"},
	{"ZFS label", "", 16 << 10, "\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01"},
	{"stamp of a format that csi-node was about to begin", "", 0, stampMagic},
	{"swap area", "", 4<<10 - 10, "SWAPSPACE2"},
	{"swap area", "", 8<<10 - 10, "SWAPSPACE2"},
	{"swap area", "", 16<<10 - 10, "SWAPSPACE2"},
	{"swap area", "", 32<<10 - 10, "SWAPSPACE2"},
	{"swap area", "", 64<<10 - 10, "SWAPSPACE2"},
	{"swap area", "", 4<<10 - 10, "SWAP-SPACE"},
	{"suspend image", "", 4<<10 - 10, "S1SUSPEND"},
	{"suspend image", "", 4<<10 - 10, "S2SUSPEND"},
	{unfinishedBtrfs, "", btrfsOffset + 0x40, btrfsUnmade},
	{"f2fs file system", "f2fs", 1024, "\x10\x20\xf5\xf2"},
	{"erofs file system", "erofs", 1024, "\xe2\xe1\xf5\xe0"},
	{"squashfs file system", "squashfs", 0, "hsqs"},
	{"reiserfs file system", "reiserfs", 64<<10 + 52, "ReIsErFs"},
	{"reiserfs file system", "reiserfs", 64<<10 + 52, "ReIsEr2Fs"},
	{"reiserfs file system", "reiserfs", 64<<10 + 52, "ReIsEr3Fs"},
	{"reiserfs file system", "reiserfs", 8<<10 + 52, "ReIsErFs"},
	{"jfs file system", "jfs", 32 << 10, "JFS1"},
	{"gfs2 file system", "gfs2", 64 << 10, "\x01\x16\x19\x70\x00\x00\x00\x01"},
	{"ocfs2 file system", "ocfs2", 1 << 10, "OCFSV2"},
	{"ocfs2 file system", "ocfs2", 2 << 10, "OCFSV2"},
	{"ocfs2 file system", "ocfs2", 4 << 10, "OCFSV2"},
	{"ocfs2 file system", "ocfs2", 8 << 10, "OCFSV2"},
	{"iso9660 file system", "iso9660", 32<<10 + 1, "CD001"},
	{"udf file system", "udf", 32<<10 + 1, "BEA01"},
	{"hfsplus file system", "hfsplus", 1024, "H+\x00\x04"},
	{"ntfs file system", "ntfs", 3, "NTFS    "},
	{"exfat file system", "exfat", 3, "EXFAT   "},
	{"vfat file system", "vfat", 82, "FAT32   "},
	{"vfat file system", "vfat", 54, "FAT16   "},
	{"vfat file system", "vfat", 54, "FAT12   "},
}

// unfinishedBtrfs is what is found of a btrfs that nobody can have used.
const unfinishedBtrfs = "btrfs that mkfs.btrfs did not finish"

const (
	mdMagic    = "\xfc\x4e\x2b\xa9" // little-endian; 0.90 may be of either order
	mdMagicBig = "\xa9\x2b\x4e\xfc"
	gptMagic   = "EFI PART"
	bootMagic  = "\x55\xaa"
	mbrEntries = 446
)

// headSignatures names what is at the head of a device beside the kinds' own
// superblocks, and the type of the first file system among it.
func headSignatures(head []byte) (found []string, fsType string) {
	for _, s := range headTable {
		if !magicAt(head, s.offset, s.magic) {
			continue
		}
		found = append(found, fmt.Sprintf("%s at byte %d", s.name, s.offset))
		if fsType == "" {
			fsType = s.fsType
		}
	}
	if isJournalDevice(head) {
		found = append(found, "external ext4 journal at byte 1024")
	}
	if len(found) == 0 && hasPartitions(head) { // GPT and FAT carry one for show
		found = append(found, "MBR partition table at byte 446")
	}
	return found, fsType
}

// farSignatures names what is at the end of a device, and the superblocks of a
// btrfs that lost its first one: btrfs check can bring it back from them.
func farSignatures(d *device) ([]string, error) {
	found, err := tailOwners(d, 0)
	if err != nil {
		return nil, err
	}
	for _, mirror := range btrfsMirrors {
		b, err := d.readAt(mirror+0x40, int64(len(btrfsMagic)))
		if err != nil {
			return nil, err
		}
		if string(b) == btrfsMagic {
			found = append(found, fmt.Sprintf("copy of a btrfs superblock at byte %d", mirror))
		}
	}
	for _, sector := range []int64{512, 4096} {
		b, err := d.readAt(d.bytes-sector, int64(len(gptMagic)))
		if err != nil {
			return nil, err
		}
		if string(b) == gptMagic {
			found = append(found, fmt.Sprintf("backup GPT partition table at byte %d", d.bytes-sector))
		}
	}
	return found, nil
}

// tailOwners names what at the end of a device, at or behind byte from, says
// that the device belongs to somebody: RAID superblocks 0.90 and 1.0, whose
// members hold a file system at their start (md(4)).
func tailOwners(d *device, from int64) ([]string, error) {
	var found []string
	for _, s := range []struct {
		name   string
		offset int64
	}{
		{"MD RAID 0.90 superblock", d.bytes&^(64<<10-1) - 64<<10},
		{"MD RAID 1.0 superblock", (d.bytes/512 - 16) &^ 7 * 512},
	} {
		if s.offset < max(from, 0) {
			continue
		}
		b, err := d.readAt(s.offset, int64(len(mdMagic)))
		if err != nil {
			return nil, err
		}
		if string(b) == mdMagic || string(b) == mdMagicBig {
			found = append(found, fmt.Sprintf("%s at byte %d", s.name, s.offset))
		}
	}
	return found, nil
}

// hasPartitions reports whether the first sector is an MBR with at least one
// entry. A boot sector alone is no partition table: its code may stand before an ext4.
func hasPartitions(head []byte) bool {
	if !magicAt(head, 510, bootMagic) {
		return false
	}
	entries := 0
	for e := range 4 {
		entry := head[mbrEntries+16*e:][:16]
		if entry[0]&0x7f != 0 {
			return false // no boot indicator: this is code
		}
		if entry[4] != 0 && binary.LittleEndian.Uint32(entry[12:]) != 0 {
			entries++
		}
	}
	return entries > 0
}

// isJournalDevice reports whether the device holds nothing but the journal of
// an ext4 on another device.
func isJournalDevice(head []byte) bool {
	return len(head) > ext4Offset+0x60 && magicAt(head, ext4Offset+0x38, ext4Magic) && head[ext4Offset+0x60]&incompatJournalDev != 0
}

func magicAt(b []byte, offset int, magic string) bool {
	return len(b) >= offset+len(magic) && bytes.Equal(b[offset:offset+len(magic)], []byte(magic))
}
