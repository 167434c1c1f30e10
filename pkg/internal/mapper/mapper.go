// Package mapper asks the device mapper for devices without a program: by a name or a UUID,
// which takes one system call, however many devices there are, or by how a UUID begins.
package mapper

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// control is the node to which the device mapper's requests go. An open of it loads the
// module.
const control = "/dev/mapper/control"

// The requests (linux/dm-ioctl.h).
const (
	removeRequest = 4
	statusRequest = 7
)

// request is struct dm_ioctl.
type request struct {
	version     [3]uint32
	dataSize    uint32
	dataStart   uint32
	targetCount uint32
	openCount   int32
	flags       uint32
	eventNumber uint32
	_           uint32
	device      uint64
	name        [128]byte
	uuid        [129]byte
	_           [7]byte
}

// suspended is DM_SUSPEND_FLAG.
const suspended = 1 << 1

// Device is a device of the device mapper.
type Device struct {
	Name      string
	Number    state.DeviceNumber
	UUID      string // "LVM-…", "CRYPT-…"; may be empty
	Opens     int    // who has it open, mounts among them
	Suspended bool   // whoever reads or writes it waits
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
	r, err := ask(statusRequest, name, uuid)
	if errors.Is(err, unix.ENXIO) || errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV) { // without the module there are no devices
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("device mapper: %s%s: %w", name, uuid, err)
	}
	return &Device{
		Name:      text(r.name[:]),
		Number:    state.DeviceNumber{Major: unix.Major(r.device), Minor: unix.Minor(r.device)},
		UUID:      text(r.uuid[:]),
		Opens:     int(r.openCount),
		Suspended: r.flags&suspended != 0,
	}, nil
}

// text returns what stands before the first zero.
func text(field []byte) string {
	before, _, _ := bytes.Cut(field, []byte{0})
	return string(before)
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
		if name, uuid := read("/sys/class/block/" + entry.Name()); strings.HasPrefix(uuid, prefix) {
			names = append(names, name)
		}
	}
	return names, nil
}

// Remove removes the device of a name, whatever it is made of; there may be none. EBUSY:
// it is open.
func Remove(name string) error {
	_, err := ask(removeRequest, name, "")
	if err == nil || errors.Is(err, unix.ENXIO) {
		return nil
	}
	return fmt.Errorf("device mapper: remove %s: %w", name, err)
}

// ask makes a request about the device of a name, or, if that is empty, of a UUID.
func ask(number uintptr, name, uuid string) (r request, err error) {
	f, err := rawfile.Open(control, unix.O_RDWR, 0)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	if len(name) >= len(r.name) || len(uuid) >= len(r.uuid) {
		return r, unix.ENAMETOOLONG
	}
	r.version = [3]uint32{4, 0, 0}
	r.dataSize = uint32(unsafe.Sizeof(r))
	copy(r.name[:], name)
	copy(r.uuid[:], uuid)
	const readWrite, magic = 3, 0xfd
	request := readWrite<<30 | unsafe.Sizeof(r)<<16 | magic<<8 | number
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(unsafe.Pointer(&r))); errno != 0 {
		return r, errno
	}
	return r, nil
}

// At returns the name and the UUID of the device with a number; empty if it is none of
// the device mapper's.
func At(number state.DeviceNumber) (name, uuid string) {
	return read("/sys/dev/block/" + number.String())
}

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
