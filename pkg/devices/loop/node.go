package loop

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/state"
)

// open opens the node of a loop device, which it makes if it is missing: a
// container's own /dev does not get the nodes of new devices. What else is at
// the node's path it neither opens nor replaces: it may be a file with data
// ("dd of=/dev/loop9"), or the node of another device that somebody uses by
// this name.
//
// ENOENT, ENXIO, ENODEV: there is no such device, or it is going away.
func open(name string, flags int) (*os.File, error) {
	number, err := numberOfLoop(name)
	if err != nil {
		return nil, err
	}
	path := "/dev/" + name
	err = checkNode(path, number)
	if errors.Is(err, os.ErrNotExist) {
		err = makeNode(path, number)
	}
	if err != nil {
		return nil, err
	}
	return os.OpenFile(path, flags|unix.O_NOFOLLOW, 0)
}

// numberOfLoop returns the number of a device, which is not that in its name
// where the driver keeps minors for partitions (max_part).
func numberOfLoop(name string) (n state.DeviceNumber, err error) {
	raw, err := os.ReadFile(filepath.Join(sysBlock, name, "dev"))
	if err != nil {
		return n, err
	}
	if _, err := fmt.Sscanf(string(raw), "%d:%d", &n.Major, &n.Minor); err != nil {
		return n, fmt.Errorf("device number of %s: %w", name, err)
	}
	return n, nil
}

// checkNode looks at a path without opening it.
func checkNode(path string, want state.DeviceNumber) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFBLK:
		return fmt.Errorf("%s is no block device: remove it, so that the node of device %s can be made there", path, want)
	case numberOf(st.Rdev) != want:
		return fmt.Errorf("%s is the node of device %s, not %s: remove it, or mount the host's /dev here", path, numberOf(st.Rdev), want)
	}
	return nil
}

// makeNode makes a node as udev does, for root and the group disk.
func makeNode(path string, number state.DeviceNumber) error {
	err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(number.Major, number.Minor)))
	if errors.Is(err, unix.EEXIST) { // made meanwhile
		return checkNode(path, number)
	}
	if err != nil {
		return &os.PathError{Op: "mknod", Path: path, Err: err}
	}
	group := 0
	if disk, err := user.LookupGroup("disk"); err == nil {
		if group, err = strconv.Atoi(disk.Gid); err != nil {
			return fmt.Errorf("group disk: %w", err)
		}
	}
	if err := os.Lchown(path, 0, group); err != nil {
		return err
	}
	return os.Chmod(path, 0o660) // mknod's mode is less the umask
}
