package loop

import (
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"
)

// directFilesystems are those whose files loop devices use with direct I/O.
// Others may say that they can: but btrfs, for one, takes checksums of pages
// that the file system on the device may change meanwhile.
var directFilesystems = []int64{unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC}

// bufferedReason says why a loop device over f, with sectors of so many bytes, has
// to go through f's page cache; "" when it can do direct I/O. That keeps data in
// one page cache instead of two, and reports an error of the disk to the request
// that met it. It makes no promise of its own: a flush of the device is an fsync
// of the file either way.
//
// The kernel declines silently what does not fit (LO_FLAGS_DIRECT_IO then reads
// as unset); some versions take what fails later, so they are asked for less.
func bufferedReason(f *os.File, sector int) string {
	var st unix.Statx_t
	if err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_TYPE|unix.STATX_DIOALIGN, &st); err != nil {
		return fmt.Sprintf("statx: %v", err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return "" // a view, whose sectors are those of its device
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		return fmt.Sprintf("statfs: %v", err)
	}
	switch {
	case !slices.Contains(directFilesystems, int64(fs.Type)):
		return fmt.Sprintf("the backing's file system, type %#x, is neither ext4 nor xfs", fs.Type)
	case st.Mask&unix.STATX_DIOALIGN == 0:
		return "the kernel does not tell what direct I/O takes (Linux 6.1)"
	case st.Dio_offset_align == 0:
		return "the backing's file system does no direct I/O on this file"
	case int(st.Dio_offset_align) > sector:
		return fmt.Sprintf("direct I/O takes sectors of %d bytes", st.Dio_offset_align)
	}
	return ""
}
