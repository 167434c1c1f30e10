// Package devnode opens block devices by nodes that are surely theirs.
package devnode

import (
	"errors"
	"fmt"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// Open opens the node of a block device at a path in /dev, and makes it if it is
// missing: a container's own /dev does not get the nodes of new devices. What else
// is at the path it neither opens nor replaces: it may be a file with data
// ("dd of=/dev/loop9"), or the node of another device that somebody uses by
// this name.
//
// os.ErrNotExist, ENXIO, ENODEV: there is no such device, or it is going away.
func Open(path string, number state.DeviceNumber, flags int) (*os.File, error) {
	if err := Ensure(path, number); err != nil {
		return nil, err
	}
	return rawfile.Open(path, flags|unix.O_NOFOLLOW, 0)
}

// Ensure makes the node of a block device if there is nothing at its path in /dev, and returns an
// error if something else is there.
func Ensure(path string, number state.DeviceNumber) error {
	err := check(path, number)
	if errors.Is(err, os.ErrNotExist) {
		return makeNode(path, number)
	}
	return err
}

// IsAt reports whether the node of a block device is at a path. It opens nothing.
func IsAt(path string, number state.DeviceNumber) bool { return check(path, number) == nil }

// PathOf returns the path at which the kernel wants the node of a block device.
// ENOENT: there is no such device.
func PathOf(number state.DeviceNumber) (string, error) {
	link, err := os.Readlink(filepath.Join("/sys/dev/block", number.String()))
	if err != nil {
		return "", err
	}
	return "/dev/" + strings.ReplaceAll(filepath.Base(link), "!", "/"), nil // sysfs has no slashes in names
}

// ReadNumber reads a file of sysfs that holds the number of a device.
// os.ErrNotExist: there is no such device, or it is going away.
func ReadNumber(file string) (n state.DeviceNumber, err error) {
	raw, err := rawfile.ReadAttribute(file)
	if errors.Is(err, unix.ENODEV) { // it was removed since the file was opened
		return n, fmt.Errorf("%w: %w", err, os.ErrNotExist)
	}
	if err != nil {
		return n, err
	}
	if _, err := fmt.Sscanf(string(raw), "%d:%d", &n.Major, &n.Minor); err != nil {
		return n, fmt.Errorf("device number in %s: %w", file, err)
	}
	return n, nil
}

// NumberAt returns the number of the block device whose node is at a path, or where a link
// there leads. It opens nothing. False: there is no such node.
func NumberAt(path string) (state.DeviceNumber, bool) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return state.DeviceNumber{}, false
	}
	return NumberOf(st.Rdev), true
}

// NumberOf returns a device number as stat(2) tells it.
func NumberOf(dev uint64) state.DeviceNumber {
	return state.DeviceNumber{Major: unix.Major(dev), Minor: unix.Minor(dev)}
}

// check looks at a path without opening it.
func check(path string, want state.DeviceNumber) error {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return &os.PathError{Op: "lstat", Path: path, Err: err}
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFBLK:
		return fmt.Errorf("%s is no block device: remove it, so that the node of device %s can be made there", path, want)
	case NumberOf(st.Rdev) != want:
		return fmt.Errorf("%s is the node of device %s, not %s: remove it, or mount the host's /dev here", path, NumberOf(st.Rdev), want)
	}
	return nil
}

// makeNode makes a node as udev does, for root and the group disk. Some are in a directory of
// their own, such as /dev/cciss.
func makeNode(path string, number state.DeviceNumber) error {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(number.Major, number.Minor)))
	if errors.Is(err, unix.EEXIST) { // made meanwhile
		return check(path, number)
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
