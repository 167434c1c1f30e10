package filesystem

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"os"
)

const (
	ext4Offset = 1024 // of the superblock, whatever the block size
	ext4Length = 1024
	ext4Magic  = "\x53\xef"

	stateValid = 0x1 // s_state: cleanly unmounted, or has a journal
	stateError = 0x2 // s_state: the kernel has seen errors

	compatHasJournal   = 0x4
	compatSparseSuper2 = 0x200

	incompatFileType   = 0x2
	incompatRecover    = 0x4
	incompatJournalDev = 0x8
	incompatMetaBG     = 0x10
	incompat64Bit      = 0x80

	roSparseSuper  = 0x1
	roLargeFile    = 0x2
	roBTreeDir     = 0x4
	roBigalloc     = 0x200
	roMetadataCsum = 0x400
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// ext4Super holds the needed fields of struct ext4_super_block (fs/ext4/ext4.h).
type ext4Super struct {
	compat, incompat, roCompat uint32
	blocks                     int64
	firstBlock                 int64
	blockSize                  int64
	clusterRatio               int64 // blocks a cluster
	blocksPerGroup             int64
	inodesPerGroup             int64
	inodeSize                  int64
	descSize                   int64
	reservedGDT                int64
	backupGroups               [2]uint32
	inodes                     int64
	state                      uint16
	uuid                       [16]byte
}

// parseExt4 reads an ext2, ext3 or ext4 superblock from the head of a device:
// nil without the magic, an error when the superblock is damaged.
func parseExt4(head []byte) (*ext4Super, error) {
	if len(head) < ext4Offset+ext4Length || !magicAt(head, ext4Offset+0x38, ext4Magic) || isJournalDevice(head) {
		return nil, nil
	}
	b := head[ext4Offset:][:ext4Length]
	u16 := func(offset int) int64 { return int64(binary.LittleEndian.Uint16(b[offset:])) }
	u32 := func(offset int) uint32 { return binary.LittleEndian.Uint32(b[offset:]) }
	s := &ext4Super{
		compat: u32(0x5c), incompat: u32(0x60), roCompat: u32(0x64),
		inodes:         int64(u32(0x0)),
		blocks:         int64(u32(0x4)),
		firstBlock:     int64(u32(0x14)),
		blocksPerGroup: int64(u32(0x20)),
		inodesPerGroup: int64(u32(0x28)),
		state:          uint16(u16(0x3a)),
		inodeSize:      u16(0x58),
		reservedGDT:    u16(0xce),
		descSize:       32,
		clusterRatio:   1,
		backupGroups:   [2]uint32{u32(0x24c), u32(0x250)},
		uuid:           [16]byte(b[0x68:]),
	}
	if u32(0x4c) == 0 { // s_rev_level: EXT2_GOOD_OLD_REV has none of the later fields
		s.compat, s.incompat, s.roCompat, s.inodeSize = 0, 0, 0, 128
	}
	if s.incompat&incompat64Bit != 0 {
		s.blocks |= int64(u32(0x150)) << 32
		s.descSize = u16(0xfe)
	}
	logBlock, logCluster := u32(0x18), u32(0x1c)
	if s.roCompat&roMetadataCsum != 0 && ^crc32.Checksum(b[:0x3fc], castagnoli) != u32(0x3fc) {
		return nil, damagedExt4("its checksum is wrong")
	}
	if logBlock > 6 {
		return nil, damagedExt4("its block size is 2^%d KiB", logBlock)
	}
	if s.compat&compatHasJournal != 0 && u32(0xe0) == 0 { // s_journal_inum: the kernel would write to the device that s_journal_dev names by its number
		return nil, fmt.Errorf("an ext4 with its journal on another device: only an ext4 on a single device is mounted as a volume")
	}
	s.blockSize = 1024 << logBlock
	if s.roCompat&roBigalloc != 0 {
		if logCluster < logBlock || logCluster > 20 {
			return nil, damagedExt4("its cluster size is 2^%d KiB", logCluster)
		}
		s.clusterRatio = 1 << (logCluster - logBlock)
	}
	return s, s.consistent()
}

// consistent checks what growth and size are computed from, as the kernel
// does at mount (ext4_block_group_meta_init and ext4_geometry_check in fs/ext4/super.c).
func (s *ext4Super) consistent() error {
	powerOfTwo := func(n int64) bool { return n > 0 && n&(n-1) == 0 }
	switch {
	case s.blocksPerGroup == 0 || s.blocksPerGroup > 8*s.blockSize*s.clusterRatio:
		return damagedExt4("it has groups of %d blocks", s.blocksPerGroup)
	case !powerOfTwo(s.inodeSize) || s.inodeSize < 128 || s.inodeSize > s.blockSize:
		return damagedExt4("it has inodes of %d bytes", s.inodeSize)
	case s.inodesPerGroup == 0 || s.inodesPerGroup > 8*s.blockSize:
		return damagedExt4("it has groups of %d inodes", s.inodesPerGroup)
	case !powerOfTwo(s.descSize) || s.descSize < 32 || s.descSize > s.blockSize:
		return damagedExt4("it has group descriptors of %d bytes", s.descSize)
	case s.firstBlock > 1 || s.firstBlock == 1 && s.blockSize != 1024:
		return damagedExt4("its first block is %d", s.firstBlock)
	case s.blocks <= s.firstBlock || s.blocks > mostBytes/s.blockSize || s.groups(s.blocks) > 1<<32-1:
		return damagedExt4("it has %d blocks", s.blocks)
	case s.groups(s.blocks)*s.inodesPerGroup != s.inodes:
		return damagedExt4("it has %d inodes in %d groups of %d", s.inodes, s.groups(s.blocks), s.inodesPerGroup)
	}
	return nil
}

func damagedExt4(format string, args ...any) error {
	return fmt.Errorf("damaged ext4 superblock at byte %d: %s", ext4Offset, fmt.Sprintf(format, args...))
}

// fsType tells ext2 and ext3 from ext4 by the features that they lack, as
// libblkid does.
func (s *ext4Super) fsType() string {
	const (
		incompat = incompatFileType | incompatMetaBG
		roCompat = roSparseSuper | roLargeFile | roBTreeDir
	)
	switch {
	case s.incompat&^(incompat|incompatRecover) != 0 || s.roCompat&^roCompat != 0:
		return "ext4"
	case s.compat&compatHasJournal != 0:
		return "ext3"
	}
	return "ext2"
}

// needsCheck reports whether the next mount should wait for e2fsck: the kernel
// has seen errors, or an unclean end without a journal. A journal that waits
// to be replayed, and orphaned inodes, are the next mount's own work.
func (s *ext4Super) needsCheck() bool { return s.state&stateValid == 0 || s.state&stateError != 0 }

// grown returns how many bytes resize2fs would make of the file system on a
// device: main and adjust_new_size of resize2fs (e2fsprogs 1.46.4 and later). The
// last group is left out when it has fewer than 50 blocks to spare for data.
func (s *ext4Super) grown(deviceBytes int64) int64 {
	size := deviceBytes / s.blockSize
	if page := int64(os.Getpagesize()) / s.blockSize; page > 1 {
		size -= size % page
	}
	size -= size % s.clusterRatio
	if s.incompat&incompat64Bit == 0 && size >= 1<<32 {
		if size > 1<<32 {
			return s.blocks * s.blockSize // resize2fs refuses
		}
		size--
	}
	if size = s.wholeGroups(size); size < s.blocks {
		size = s.blocks
	}
	return size * s.blockSize
}

// wholeGroups is adjust_new_size of resize2fs; 0 when resize2fs would refuse.
func (s *ext4Super) wholeGroups(size int64) int64 {
	for {
		groups := s.groups(size)
		if groups <= 0 {
			return 0
		}
		perBlock := s.blockSize / s.descSize
		descBlocks := (groups + perBlock - 1) / perBlock
		if descBlocks+s.firstBlock > s.blocksPerGroup {
			return 0
		}
		overhead := 2 + (s.inodesPerGroup*s.inodeSize+s.blockSize-1)/s.blockSize
		if s.lastHasCopy(groups) {
			overhead += 1 + descBlocks + s.reservedGDT
		}
		rest := (size - s.firstBlock) % s.blocksPerGroup
		switch {
		case groups == 1 && rest > 0 && rest < overhead:
			return 0
		case groups > 1 && rest > 0 && rest < overhead+50:
			size -= rest
		case s.inodesPerGroup*groups > 1<<32-1:
			if s.inodesPerGroup*(groups-1) > 1<<32-1 {
				return 0
			}
			size = s.blocksPerGroup*(groups-1) + s.firstBlock
		default:
			return size
		}
	}
}

func (s *ext4Super) groups(blocks int64) int64 {
	return (blocks - s.firstBlock + s.blocksPerGroup - 1) / s.blocksPerGroup
}

// lastHasCopy reports whether the last of so many groups has a copy of the superblock.
func (s *ext4Super) lastHasCopy(groups int64) bool {
	if s.compat&compatSparseSuper2 != 0 {
		if groups == 2 {
			return s.backupGroups[0] != 0
		}
		return s.backupGroups[1] != 0
	}
	last := groups - 1
	if last <= 1 || s.roCompat&roSparseSuper == 0 {
		return true
	}
	for _, base := range []int64{3, 5, 7} {
		power := base
		for power < last {
			power *= base
		}
		if power == last {
			return true
		}
	}
	return false
}
