package filesystem

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
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
	intelMagic = "Intel Raid ISM Cfg Sig. "
	gptMagic   = "EFI PART"
	bootMagic  = "\x55\xaa"
	mbrEntries = 446
)

// ownHead is how far no file lies at the head of an ext4 or xfs. What is behind that can be what
// a user has written: xfs gives the blocks from 24 KiB on to the first files, and the inodes of a
// small ext4, which hold the names that symbolic links lead to, begin below 64 KiB.
const ownHead = 16 << 10

// headSignatures names what is at the head of a device beside the kinds' own
// superblocks, and the type of the first file system among it. Where files of a valid file
// system can lie only owners count: the makers of all others overwrite the superblock of an ext4
// or xfs, which has been made since, if it is whole. mkudffs does not always: see hasUDF.
func headSignatures(head []byte, sb *superblock) (found []string, fsType string) {
	own := headSize
	if sb != nil {
		own = sb.own
	}
	for _, s := range headTable {
		if !magicAt(head, s.offset, s.magic) || s.offset >= own && !isOwner(s.name) {
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
	if hasPartitions(head) && !slices.ContainsFunc(found, fillsFirstSector) {
		found = append(found, "MBR partition table at byte 446")
	}
	return found, fsType
}

// hasUDF reports whether a device with a file system of another kind is a UDF all the same, by its
// anchor, which stands at sector 256 (ECMA-167 3/10.2): the signature at its head can be a file's.
func hasUDF(d *device, head []byte) (bool, error) {
	if !magicAt(head, 32<<10+1, "BEA01") {
		return false, nil
	}
	for _, sector := range []int64{512, 2048, 4096} {
		tag, err := d.readAt(256*sector, 16)
		if err != nil {
			return false, err
		}
		if len(tag) == 16 && binary.LittleEndian.Uint16(tag) == 2 && binary.LittleEndian.Uint32(tag[12:]) == 256 {
			return true, nil
		}
	}
	return false, nil
}

// fillsFirstSector reports whether what was found has the first sector to itself: what looks
// like an MBR there is for show, as that of a GPT, or by chance.
func fillsFirstSector(found string) bool {
	names := []string{"GPT ", "LUKS ", "BitLocker ", "ntfs ", "exfat ", "vfat "}
	return slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(found, name) })
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
// that the device belongs to somebody: the metadata of RAID and of DRBD, whose
// members hold a file system at their start (md(4), and libblkid).
func tailOwners(d *device, from int64) ([]string, error) {
	var found []string
	for _, s := range []struct {
		name   string
		offset int64
		magics []string
	}{
		{"MD RAID 0.90 superblock", d.bytes&^(64<<10-1) - 64<<10, []string{mdMagic, mdMagicBig}},
		{"MD RAID 1.0 superblock", (d.bytes/512 - 16) &^ 7 * 512, []string{mdMagic, mdMagicBig}},
		{"Intel RAID metadata", d.bytes - 2*512, []string{intelMagic}},
		{"Intel RAID metadata", d.bytes - 2*4096, []string{intelMagic}}, // of a disk with sectors of 4 KiB
		{"DDF RAID header", d.bytes - 512, []string{"\xde\x11\xde\x11", "\x11\xde\x11\xde"}},
		{"DRBD metadata", d.bytes - 4096 + 60, []string{"\x83\x74\x02\x6b", "\x83\x74\x02\x6c", "\x83\x74\x02\x6d"}},
	} {
		if s.offset < max(from, 0) {
			continue
		}
		b, err := d.readAt(s.offset, int64(len(s.magics[0])))
		if err != nil {
			return nil, err
		}
		if slices.Contains(s.magics, string(b)) {
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
