package filesystem

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"unsafe"

	"github.com/csi-node/csi-node/pkg/state"
)

const (
	xfsMagic       = "XFSB"
	xfsSmallestAG  = 64   // blocks: XFS_MIN_AG_BLOCKS in fs/xfs/libxfs/xfs_fs.h
	xfsNeedsRepair = 0x10 // XFS_SB_FEAT_INCOMPAT_NEEDSREPAIR
)

// xfs is the kind of xfs.
type xfs struct{}

func (xfs) traits() traits {
	return traits{
		name:         "xfs",
		programs:     []string{"mkfs.xfs"},
		debian:       "xfsprogs",
		smallest:     300 << 20, // mkfs.xfs of xfsprogs 5.19 and later
		growsMounted: true,
	}
}

// mountRules: an xfs is mounted with nouuid, always: a volume that was restored from
// a copy of another has the same UUID, and the kernel mounts but one of them. The
// check that is lost guards against one disk seen twice; a volume's file
// backs no more than one writable device.
func (xfs) mountRules() mountRules {
	return mountRules{always: []string{"nouuid"}, noRecovery: "norecovery", logPrefix: "XFS: "}
}

// parse reads struct xfs_dsb (fs/xfs/libxfs/xfs_format.h).
func (xfs) parse(head []byte) (*superblock, error) {
	if !magicAt(head, 0, xfsMagic) || len(head) < 512 {
		return nil, nil
	}
	u32 := func(offset int) int64 { return int64(binary.BigEndian.Uint32(head[offset:])) }
	g := xfsGeometry{
		blockSize: u32(4),
		blocks:    int64(binary.BigEndian.Uint64(head[8:])),
		agBlocks:  u32(84),
		ags:       u32(88),
	}
	sector := int(binary.BigEndian.Uint16(head[102:]))
	version := binary.BigEndian.Uint16(head[100:]) & 0xf
	switch {
	case version != 4 && version != 5:
		return nil, damagedXFS("its version is %d", version)
	case sector < 512 || sector > 32<<10 || sector&(sector-1) != 0 || sector > len(head):
		return nil, damagedXFS("its sector size is %d bytes", sector)
	case version == 5 && xfsChecksum(head[:sector]) != binary.LittleEndian.Uint32(head[224:]):
		return nil, damagedXFS("its checksum is wrong")
	case head[126] != 0: // sb_inprogress
		return nil, damagedXFS("its mkfs.xfs or its copy was interrupted")
	case version == 5 && u32(216)&xfsNeedsRepair != 0:
		return nil, damagedXFS("it is marked for xfs_repair, to be run by hand")
	case g.blockSize < 512 || g.blockSize > 64<<10 || g.blockSize&(g.blockSize-1) != 0:
		return nil, damagedXFS("its block size is %d bytes", g.blockSize)
	case g.agBlocks < xfsSmallestAG || g.blocks < 1 || g.blocks > mostBytes/g.blockSize ||
		(g.blocks+g.agBlocks-1)/g.agBlocks != g.ags:
		return nil, damagedXFS("it has %d blocks in %d groups of %d", g.blocks, g.ags, g.agBlocks)
	}
	sb := &superblock{fsType: "xfs", uuid: [16]byte(head[32:]), own: ownHead}
	g.put(sb)
	return sb, nil
}

func damagedXFS(format string, args ...any) error {
	return fmt.Errorf("damaged xfs superblock at byte 0: %s", fmt.Sprintf(format, args...))
}

// xfsChecksum is the CRC32c of the superblock's sector with its own field zero.
func xfsChecksum(sector []byte) uint32 {
	crc := crc32.Update(0, castagnoli, sector[:224])
	crc = crc32.Update(crc, castagnoli, make([]byte, 4))
	return crc32.Update(crc, castagnoli, sector[228:])
}

// xfsGeometry is what size and growth are computed from.
type xfsGeometry struct {
	blockSize, blocks, agBlocks, ags int64
}

func (g xfsGeometry) put(sb *superblock) {
	sb.bytes, sb.grown = g.blocks*g.blockSize, g.grown
}

// grown returns how many bytes xfs_growfs would make of the file system on a
// device: a last allocation group under 64 blocks is left out
// (xfs_growfs_data_private in fs/xfs/xfs_fsops.c).
func (g xfsGeometry) grown(deviceBytes int64) int64 {
	blocks := deviceBytes / g.blockSize
	if rest := blocks % g.agBlocks; rest < xfsSmallestAG {
		blocks -= rest
	}
	return max(blocks, g.blocks) * g.blockSize
}

// xfsFSOpGeomV1 is struct xfs_fsop_geom_v1 (fs/xfs/libxfs/xfs_fs.h).
type xfsFSOpGeomV1 struct {
	blocksize, rtextsize, agblocks, agcount, logblocks, sectsize, inodesize, imaxpct uint32
	datablocks, rtblocks, rtextents, logstart                                        uint64
	uuid                                                                             [16]byte
	sunit, swidth                                                                    uint32
	version                                                                          int32
	flags, logsectsize, rtsectsize, dirblocksize                                     uint32
	_                                                                                uint32
}

// live asks the kernel for the size: a mounted xfs writes its superblock long
// after it has grown.
func (xfs) live(d *device, mountpoint string, sb *superblock) error {
	root, err := d.openRoot(mountpoint)
	if err != nil {
		return err
	}
	geometry, err := xfsAsk(root)
	if err = errors.Join(err, root.Close()); err != nil {
		return err
	}
	xfsGeometry{
		blockSize: int64(geometry.blocksize),
		blocks:    int64(geometry.datablocks),
		agBlocks:  int64(geometry.agblocks),
		ags:       int64(geometry.agcount),
	}.put(sb)
	return nil
}

func xfsAsk(root *os.File) (geometry xfsFSOpGeomV1, err error) {
	const ask = 0x80705864 // XFS_IOC_FSGEOMETRY_V1, _IOR('X', 100, struct xfs_fsop_geom_v1)
	if err := ioctl(root, ask, unsafe.Pointer(&geometry)); err != nil {
		return geometry, fmt.Errorf("XFS_IOC_FSGEOMETRY at %s: %w", root.Name(), err)
	}
	return geometry, nil
}

// format discards nothing (-K), which would punch holes into the file of a
// thick volume. Without -f, mkfs.xfs itself refuses a device on which libblkid
// finds anything.
func (xfs) format(ctx context.Context, d *device, uuid string, _ bool) error {
	options := []string{"-q", "-K"}
	if uuid != "" {
		options = append(options, "-m", "uuid="+uuid)
	}
	return alone("mkfs.xfs", append(options, d.Name())...).Check(ctx)
}

// check does nothing but say so: an xfs repairs itself from its log at mount,
// and its superblock never asks for a check.
func (xfs) check(context.Context, string) error {
	return state.Errorf(state.FailedPrecondition, "an xfs is not checked by the plugin; with the volume unstaged, run xfs_repair by hand")
}

// grow asks the kernel, as xfs_growfs -d does; an xfs is always mounted here.
func (xfs) grow(_ context.Context, d *device, mountpoint string, bytes int64) error {
	root, err := d.openRoot(mountpoint)
	if err != nil {
		return err
	}
	return errors.Join(growXFS(root, bytes), root.Close())
}

func growXFS(root *os.File, bytes int64) error {
	geometry, err := xfsAsk(root)
	if err != nil {
		return err
	}
	want := struct { // struct xfs_growfs_data
		blocks  uint64
		imaxpct uint32
		_       uint32
	}{uint64(bytes) / uint64(geometry.blocksize), geometry.imaxpct, 0}
	const grow = 0x4010586e // XFS_IOC_FSGROWFSDATA, _IOW('X', 110, struct xfs_growfs_data)
	if err := ioctl(root, grow, unsafe.Pointer(&want)); err != nil {
		return fmt.Errorf("XFS_IOC_FSGROWFSDATA to %d blocks at %s (see the kernel's log): %w", want.blocks, root.Name(), err)
	}
	return nil
}
