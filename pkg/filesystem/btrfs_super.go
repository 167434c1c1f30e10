package filesystem

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/crc32"
)

const (
	btrfsOffset    = 64 << 10 // of the first superblock
	btrfsLength    = 4096
	btrfsMagic     = "_BHRfS_M"
	btrfsUnmade    = "!BHRfS_M" // while mkfs.btrfs works
	btrfsSmallest  = 256 << 20  // bytes; the kernel resizes to no less, so a smaller one could not grow a little
	btrfsUUIDApart = 1 << 10    // BTRFS_FEATURE_INCOMPAT_METADATA_UUID

	btrfsWritten  = 1 << 0 // BTRFS_HEADER_FLAG_WRITTEN: always set
	btrfsRelocate = 1 << 1 // BTRFS_HEADER_FLAG_RELOC
	btrfsSeeding  = 1 << 32
)

// btrfsMirrors is where copies of the superblock are on a device that is large
// enough (btrfs_sb_offset in fs/btrfs/volumes.h).
var btrfsMirrors = []int64{64 << 20, 256 << 30}

// btrfsSuper holds the needed fields of struct btrfs_super_block (linux/btrfs_tree.h).
type btrfsSuper struct {
	uuid   [16]byte
	bytes  int64 // that it spans on its one device
	sector int64
}

// parseBtrfs reads a btrfs superblock from the head of a device: nil without
// the magic, an error when it is damaged, or is of a kind that is not mounted
// here: the kernel would need, or find, more than this device.
func parseBtrfs(head []byte) (*btrfsSuper, error) {
	if len(head) < btrfsOffset+btrfsLength || !magicAt(head, btrfsOffset+0x40, btrfsMagic) {
		return nil, nil
	}
	b := head[btrfsOffset:][:btrfsLength]
	u64 := func(offset int) uint64 { return binary.LittleEndian.Uint64(b[offset:]) }
	u32 := func(offset int) uint32 { return binary.LittleEndian.Uint32(b[offset:]) }
	if err := btrfsChecksum(b); err != nil {
		return nil, err
	}
	s := &btrfsSuper{uuid: [16]byte(b[0x20:]), bytes: int64(min(u64(0xd1), mostBytes+1)), sector: int64(u32(0x90))}
	owner := s.uuid
	if u64(0xbc)&btrfsUUIDApart != 0 { // the UUID was changed, and all but the superblock keeps the old one
		owner = [16]byte(b[0x23b:])
	}
	switch flags, devices := u64(0x38), u64(0x88); {
	case flags&btrfsSeeding != 0:
		return nil, fmt.Errorf("a btrfs that is a seed for others (btrfstune -S), which is not mounted as a volume")
	case devices > 1:
		return nil, fmt.Errorf("one of the %d devices of a btrfs: only a btrfs on a single device is mounted as a volume", devices)
	case flags&^(btrfsWritten|btrfsRelocate) != 0:
		return nil, damagedBtrfs("its flags %#x tell of an error, an unfinished conversion or a mere image", flags)
	case u64(0x30) != btrfsOffset:
		return nil, damagedBtrfs("it is the one of byte %d", u64(0x30))
	case devices != 1:
		return nil, damagedBtrfs("it has no device")
	case [16]byte(b[0x11b:]) != owner:
		return nil, damagedBtrfs("its device is of another btrfs")
	case s.sector < 512 || s.sector > 64<<10 || s.sector&(s.sector-1) != 0:
		return nil, damagedBtrfs("its sector size is %d bytes", s.sector)
	case s.bytes < 1 || s.bytes > mostBytes:
		return nil, damagedBtrfs("it spans %d bytes", u64(0xd1))
	}
	return s, nil
}

// btrfsChecksum verifies a superblock. Of the four kinds of checksum two are at
// hand; a btrfs with another one is left alone, as nobody can tell whether it is sound.
func btrfsChecksum(b []byte) error {
	switch kind := binary.LittleEndian.Uint16(b[0xc4:]); kind {
	case 0:
		if crc32.Checksum(b[0x20:], castagnoli) == binary.LittleEndian.Uint32(b) {
			return nil
		}
	case 2:
		if sha256.Sum256(b[0x20:]) == [32]byte(b) {
			return nil
		}
	case 1, 3:
		return fmt.Errorf("a btrfs with checksums of type %s, which the plugin cannot verify: it knows crc32c and sha256", map[uint16]string{1: "xxhash64", 3: "blake2b"}[kind])
	default:
		return damagedBtrfs("its checksum is of the unknown type %d", kind)
	}
	return damagedBtrfs("its checksum is wrong")
}

func damagedBtrfs(format string, args ...any) error {
	return fmt.Errorf("damaged btrfs superblock at byte %d: %s", btrfsOffset, fmt.Sprintf(format, args...))
}

// grown returns how many bytes BTRFS_IOC_RESIZE would make of it: whole sectors,
// and no less than 256 MiB (btrfs_ioctl_resize in fs/btrfs/ioctl.c).
func (s *btrfsSuper) grown(deviceBytes int64) int64 {
	if deviceBytes < btrfsSmallest {
		return s.bytes
	}
	return max(deviceBytes&^(s.sector-1), s.bytes)
}
