package filesystem

import (
	"errors"
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// A btrfs gives itself a device number of its own, and the kernel finds devices by
// the identity that is written on them, so that only the kernel can tell which
// block device is beneath. The ioctls are those of linux/btrfs.h.

// btrfsDevice is the one block device beneath a mounted btrfs.
type btrfsDevice struct {
	id     uint64 // within the btrfs
	bytes  int64  // that the btrfs spans on it
	number state.DeviceNumber
}

// btrfsInfo is struct btrfs_ioctl_fs_info_args.
type btrfsInfo struct {
	maxID, devices uint64
	fsid           [16]byte
	_              [1024 - 32]byte
}

// btrfsDeviceInfo is struct btrfs_ioctl_dev_info_args.
type btrfsDeviceInfo struct {
	id    uint64
	uuid  [16]byte
	used  uint64
	bytes uint64
	_     [3072 - 40]byte
	path  [1024]byte
}

// askBtrfs tells the device beneath the btrfs that root, any open file or directory,
// lies on. It is an error when that is no btrfs, when it has several devices,
// and when the node that the kernel names is no block device here.
func askBtrfs(root *os.File) (btrfsDevice, error) {
	const askAll, askOne = 0x8400941f, 0xd000941e // BTRFS_IOC_FS_INFO, BTRFS_IOC_DEV_INFO
	var all btrfsInfo
	if err := ioctl(root, askAll, unsafe.Pointer(&all)); err != nil {
		return btrfsDevice{}, fmt.Errorf("BTRFS_IOC_FS_INFO at %s: %w", root.Name(), err)
	}
	if all.devices != 1 {
		return btrfsDevice{}, fmt.Errorf("the btrfs at %s has %d devices", root.Name(), all.devices)
	}
	one := btrfsDeviceInfo{id: all.maxID} // numbers are never given again, so the last device mostly has the highest
	err := ioctl(root, askOne, unsafe.Pointer(&one))
	for errors.Is(err, unix.ENODEV) && one.id > 1 {
		one = btrfsDeviceInfo{id: one.id - 1}
		err = ioctl(root, askOne, unsafe.Pointer(&one))
	}
	if err != nil {
		return btrfsDevice{}, fmt.Errorf("BTRFS_IOC_DEV_INFO of device %d at %s: %w", one.id, root.Name(), err)
	}
	path := unix.ByteSliceToString(one.path[:])
	number, there := devnode.NumberAt(path)
	if !there {
		return btrfsDevice{}, fmt.Errorf("the kernel says that the btrfs is on %q, which is no block device here", path)
	}
	return btrfsDevice{id: one.id, bytes: int64(one.bytes), number: number}, nil
}

// resizeBtrfs makes the btrfs of root span so many bytes of its device. It blocks
// until that is committed. The kernel refuses with EINVAL what is less than 256 MiB.
func resizeBtrfs(root *os.File, device btrfsDevice, bytes int64) error {
	const resize = 0x50009403 // BTRFS_IOC_RESIZE
	args := struct {          // struct btrfs_ioctl_vol_args
		fd   int64
		name [4088]byte
	}{}
	copy(args.name[:], fmt.Sprintf("%d:%d", device.id, bytes))
	busy, err := ioctlValue(root, resize, unsafe.Pointer(&args))
	switch {
	case err != nil:
		return fmt.Errorf("BTRFS_IOC_RESIZE to %d bytes at %s (see the kernel's log): %w", bytes, root.Name(), err)
	case busy != 0: // BTRFS_ERROR_DEV_EXCL_RUN_IN_PROGRESS
		return fmt.Errorf("BTRFS_IOC_RESIZE to %d bytes at %s: a balance or another such operation is under way in it", bytes, root.Name())
	}
	return nil
}
