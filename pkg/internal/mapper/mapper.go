// Package mapper asks the device mapper for devices without a program: by a name or a UUID,
// which takes one system call, however many devices there are, or by how a UUID begins; and
// for its targets.
package mapper

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// control is the node to which the device mapper's requests go. An open of it loads the
// module.
const control = "/dev/mapper/control"

// Device is a device of the device mapper.
type Device struct {
	Name   string
	Number state.DeviceNumber
	UUID   string // "LVM-…", "CRYPT-…"; may be empty
	Opens  int    // who has it open, mounts among them
}

// layerPrefix begins the names of the devices that the plugin's own layers make, such as
// encryption.
const layerPrefix = "csi-"

// LayerName returns the name for the device of a layer. The hash, of 20 bytes, tells it from
// those of all other layers of the node.
func LayerName(hash [20]byte) string { return layerPrefix + hex.EncodeToString(hash[:]) }

// IsLayer reports whether a name is one of LayerName's.
func IsLayer(name string) bool {
	hash, is := strings.CutPrefix(name, layerPrefix)
	raw, err := hex.DecodeString(hash)
	return is && err == nil && len(raw) == 20
}

// Find returns the device of a name; nil: there is none. It does not block on the device.
func Find(name string) (*Device, error) { return find(name, "") }

// FindUUID is Find by a UUID.
func FindUUID(uuid string) (*Device, error) { return find("", uuid) }

func find(name, uuid string) (*Device, error) {
	r, there, err := ask(unix.DM_DEV_STATUS, name, uuid)
	if err != nil {
		return nil, fmt.Errorf("device mapper: %s%s: %w", name, uuid, err)
	}
	if !there {
		return nil, nil
	}
	return &Device{
		Name:   unix.ByteSliceToString(r.Name[:]),
		Number: devnode.NumberOf(r.Dev),
		UUID:   unix.ByteSliceToString(r.Uuid[:]),
		Opens:  int(r.Open_count),
	}, nil
}

// Having returns the names of the devices whose UUIDs begin with a prefix. It looks at all
// there are.
func Having(prefix string) (names []string, err error) {
	entries, err := os.ReadDir("/sys/class/block")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		if !strings.HasPrefix(entry.Name(), "dm-") {
			continue
		}
		if name, uuid := Named(entry.Name()); strings.HasPrefix(uuid, prefix) {
			names = append(names, name)
		}
	}
	return names, nil
}

// Remove removes the device of a name, whatever it is made of; there may be none. EBUSY:
// it is open.
func Remove(name string) error {
	if _, _, err := ask(unix.DM_DEV_REMOVE, name, ""); err != nil {
		return fmt.Errorf("device mapper: remove %s: %w", name, err)
	}
	return nil
}

// Targets returns the names of what a device can be made of, such as "crypt": each comes
// with its module.
func Targets() ([]string, error) {
	var r struct {
		unix.DmIoctl
		list [16 << 10]byte
	}
	if there, err := send(unix.DM_LIST_VERSIONS, &r.DmIoctl, unsafe.Sizeof(r)); err != nil {
		return nil, fmt.Errorf("device mapper: %w", err)
	} else if !there {
		return nil, nil
	}
	return targetNames(r.list[:]), nil
}

// targetNames reads a list of struct dm_target_versions: the distance to the next one, 0
// for the last, a version of three numbers, and a name.
func targetNames(list []byte) (names []string) {
	const head = 16
	for len(list) > head {
		names = append(names, unix.ByteSliceToString(list[head:]))
		next := int(binary.NativeEndian.Uint32(list))
		if next == 0 || next > len(list) {
			break
		}
		list = list[next:]
	}
	return names
}

// ask makes a request about the device of a name, or, if that is empty, of a UUID, and
// reports whether there is one.
func ask(command uintptr, name, uuid string) (r unix.DmIoctl, there bool, err error) {
	if len(name) >= len(r.Name) || len(uuid) >= len(r.Uuid) {
		return r, false, nil // the kernel lets none have such a name
	}
	copy(r.Name[:], name)
	copy(r.Uuid[:], uuid)
	there, err = send(command, &r, unsafe.Sizeof(r))
	return r, there, err
}

// send sends a request, which r begins, of so many bytes. Without the module there is nothing.
func send(command uintptr, r *unix.DmIoctl, size uintptr) (there bool, err error) {
	f, err := rawfile.Open(control, unix.O_RDWR, 0)
	switch {
	case errors.Is(err, unix.ENXIO):
		return false, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
		if _, loaded := os.Stat("/sys/class/misc/device-mapper"); loaded == nil { // and its node is not here
			return false, fmt.Errorf("%w: mount the node's /dev here", err)
		}
		return false, nil
	case err != nil:
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	r.Version, r.Data_size, r.Data_start = [3]uint32{unix.DM_VERSION_MAJOR}, uint32(size), uint32(unsafe.Sizeof(*r))
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), command, uintptr(unsafe.Pointer(r)))
	if errno != 0 && errno != unix.ENXIO {
		return false, errno
	}
	return errno == 0, nil
}

// At returns the name and the UUID of the device with a number; empty if it is none of
// the device mapper's.
func At(number state.DeviceNumber) (name, uuid string) {
	return read("/sys/dev/block/" + number.String())
}

// Named is At for the device that the kernel names so, such as dm-0.
func Named(kernel string) (name, uuid string) { return read("/sys/class/block/" + kernel) }

// read returns the name and the UUID of the device that has a directory in sysfs.
func read(dir string) (name, uuid string) {
	fact := func(file string) string {
		text, err := rawfile.Read(dir + "/dm/" + file)
		if err != nil {
			return ""
		}
		return strings.TrimSuffix(string(text), "\n")
	}
	return fact("name"), fact("uuid")
}
