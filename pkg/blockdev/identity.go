package blockdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/loop"
	"github.com/csi-node/csi-node/pkg/state"
)

// IdentityKind is a kind of identity that a device may have, such as a WWID. Its values are
// also keys of volume contexts.
type IdentityKind string

// The kinds of identity.
const (
	WWID     IdentityKind = "wwid"     // SCSI or NVMe: "naa.6001405…", "t10.ATA_…", "eui.…"; udev's "36001405…" is the same
	NVMeUUID IdentityKind = "nvmeUUID" // of an NVMe namespace
	NGUID    IdentityKind = "nguid"    // of an NVMe namespace
	EUI      IdentityKind = "eui"      // of an NVMe namespace, EUI-64
	PartUUID IdentityKind = "partUUID" // of a partition
	DMUUID   IdentityKind = "dmUUID"   // of the device mapper: "LVM-…", "CRYPT-LUKS2-…", "mpath-…"
	Serial   IdentityKind = "serial"   // of virtio (20 bytes at most), SCSI, MMC; an NVMe controller's is that of each of its namespaces
	Backing  IdentityKind = "loop"     // of a loop device: "<device>:<inode>" of the file behind it
)

// IdentityKinds are all kinds, the most reliable first.
var IdentityKinds = [...]IdentityKind{PartUUID, NVMeUUID, NGUID, EUI, WWID, DMUUID, Serial, Backing}

// Info is what the kernel tells of a block device.
type Info struct {
	Number   state.DeviceNumber
	Name     string // in sysfs: "sda1"
	Path     string // of the device node: "/dev/sda1"
	Size     int64  // bytes
	ReadOnly bool   // it refuses writes, by itself or because somebody has said so (BLKROSET)
	// Sequence changes each time that another disk, or medium, gets the number; 0: the
	// kernel does not tell (before Linux 5.15).
	Sequence uint64
	// Identities is what the device is, by kind; a device may tell nothing.
	Identities map[IdentityKind]string

	// Ours: a loop device that this plugin, or another of its making, has attached for
	// a volume of its own.
	Ours bool
	// Over is the block device that a loop device shows, by whatever node; zero: none.
	Over state.DeviceNumber

	Partition  int                // 1 and up; 0: it is no partition
	Parent     string             // of a partition: the name of its disk
	Partitions []string           // of a disk: the names of its partitions
	Holders    []string           // names of the devices that are made of this one: dm, md, bcache
	Disk       state.DeviceNumber // of the whole disk
}

// Identity returns the most reliable identity of the device, such as "wwid:naa.6001405…";
// "" when the device has none. It is the same wherever the device is plugged in. It changes
// when the device is given another one, or when a newer kernel reads a more reliable one:
// see Has.
func (i Info) Identity() string {
	for _, kind := range IdentityKinds {
		if value := i.Identities[kind]; value != "" && !saysNothing(kind, value) {
			return string(kind) + ":" + value
		}
	}
	return ""
}

// Has reports whether the device has an identity that Identity returned before. By now
// Identity may return a more reliable one.
func (i Info) Has(identity string) bool {
	kind, value, _ := strings.Cut(identity, ":")
	return value != "" && i.Identities[IdentityKind(kind)] == value
}

// Contradicts reports whether the device has another identity than the one that Identity returned
// before, of the same kind.
func (i Info) Contradicts(identity string) bool {
	kind, _, known := strings.Cut(identity, ":")
	return known && i.Identities[IdentityKind(kind)] != "" && !i.Has(identity)
}

// Is reports whether the device has an identity, however it is spelled.
func (i Info) Is(kind IdentityKind, value string) bool {
	have := i.Identities[kind]
	return have != "" && have == Normal(kind, value)
}

// Normal spells an identity as Info has it, so that what udev, the kernel and
// vendors' tools print can be compared.
func Normal(kind IdentityKind, value string) string {
	value = strings.Join(strings.FieldsFunc(value, func(r rune) bool { return r == ' ' || r == '_' || r == '\t' || r == '\n' || r == 0 }), "_")
	switch kind {
	case DMUUID, Serial:
		return value
	case WWID:
		return normalWWID(value)
	}
	value = strings.ToLower(value)
	if kind == NGUID || kind == EUI {
		value = strings.TrimPrefix(strings.NewReplacer("-", "", ".", "", "_", "").Replace(value), "0x")
	}
	return value
}

// normalWWID knows udev's spelling, whose first digit stands for the kind.
func normalWWID(value string) string {
	lower := strings.ToLower(value)
	switch {
	case strings.HasPrefix(lower, "t10."):
		return "t10." + value[4:]
	case strings.HasPrefix(lower, "naa."), strings.HasPrefix(lower, "eui."), strings.HasPrefix(lower, "nvme."), strings.HasPrefix(lower, "uuid."):
		return lower
	case strings.HasPrefix(lower, "0x"):
		return "naa." + lower[2:]
	case isHex(lower) && (len(lower) == 17 || len(lower) == 33) && lower[0] == '3':
		return "naa." + lower[1:]
	case isHex(lower) && (len(lower) == 17 || len(lower) == 25 || len(lower) == 33) && lower[0] == '2':
		return "eui." + lower[1:]
	case strings.HasPrefix(value, "1"):
		return "t10." + value[1:]
	}
	return value
}

func isHex(s string) bool { return strings.Trim(s, "0123456789abcdef") == "" }

// Open opens the node of a block device for reading, with further flags of open(2), and
// returns its Info, which is read after the open, so that both are of the same device.
// Links below /dev are followed, because udev makes them, but not trusted: a caller that
// expects an identity compares it with the Info.
//
// Anything at the path that is no block device is not opened: an open may block, or rewind
// a tape. os.ErrNotExist: there is nothing. With unix.O_EXCL it fails with EBUSY while the
// device is mounted or claimed by somebody. It blocks for as long as the device's driver
// does.
func Open(path string, flags int) (*os.File, Info, error) {
	f, err := openNode(path, flags)
	if err != nil {
		return nil, Info{}, err
	}
	number, err := numberOf(f)
	if err == nil {
		var info Info
		if info, err = InfoOf(number); err == nil {
			return f, info, nil
		}
	}
	return nil, Info{}, errors.Join(fmt.Errorf("%s: %w", path, err), f.Close())
}

// Look returns the Info of the device whose node is at the path. It opens only the node of
// a loop device, whose backing cannot be learned otherwise. os.ErrNotExist: there is
// nothing, or the node has no device.
func Look(path string) (Info, error) {
	_, number, err := findNode(path)
	if err != nil {
		return Info{}, err
	}
	info, err := InfoOf(number)
	if err != nil {
		return Info{}, fmt.Errorf("%s: %w", path, err)
	}
	return info, nil
}

// InfoBySysfs is InfoOf without what only an open loop device tells: Ours, Over and the identity
// Backing. It opens nothing, so that no loop device that hangs keeps others waiting.
func InfoBySysfs(number state.DeviceNumber) (Info, error) { return host.infoOf(number) }

// InfoOf tells what the block device with a number is, by sysfs. It opens only the node of a loop
// device, as Look does. os.ErrNotExist: there is none.
func InfoOf(number state.DeviceNumber) (Info, error) {
	info, err := host.infoOf(number)
	if err == nil {
		err = info.addBacking()
	}
	return info, err
}

// Search returns the devices that have an identity: none, one, or several, as
// the paths to a multipath disk are. It looks at every block device of the node. One that
// cannot be looked at is an error only if no other one has the identity.
func Search(kind IdentityKind, value string) (found []Info, err error) {
	numbers, err := host.numbers()
	if err != nil {
		return nil, err
	}
	var unknown error
	for _, number := range numbers {
		info, err := host.infoOf(number)
		if err == nil && kind == Backing {
			err = info.addBacking()
		}
		switch {
		case errors.Is(err, os.ErrNotExist): // it went meanwhile
		case err != nil:
			unknown = errors.Join(unknown, err)
		case info.Is(kind, value):
			found = append(found, info)
		}
	}
	if len(found) > 0 {
		return found, nil
	}
	return nil, unknown
}

// findNode returns the path of a block device's node behind a path, and the
// number of the device.
func findNode(path string) (string, state.DeviceNumber, error) {
	node, err := filepath.EvalSymlinks(path)
	if err != nil {
		return "", state.DeviceNumber{}, err
	}
	var st unix.Stat_t
	if err := unix.Lstat(node, &st); err != nil {
		return "", state.DeviceNumber{}, &os.PathError{Op: "lstat", Path: node, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return "", state.DeviceNumber{}, state.Errorf(state.FailedPrecondition, "%s is no block device", path)
	}
	return node, devnode.NumberOf(st.Rdev), nil
}

func openNode(path string, flags int) (*os.File, error) {
	node, number, err := findNode(path)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(node, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK|flags, 0)
	if err != nil {
		return nil, err
	}
	if now, err := numberOf(f); err != nil || now != number {
		return nil, errors.Join(fmt.Errorf("%s was the node of device %s and is that of %s: %w", path, number, now, unix.ESTALE), err, f.Close())
	}
	return f, nil
}

// numberOf returns the number of an open block device.
func numberOf(f *os.File) (n state.DeviceNumber, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return n, &os.PathError{Op: "fstat", Path: f.Name(), Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return n, state.Errorf(state.FailedPrecondition, "%s is no block device", f.Name())
	}
	return devnode.NumberOf(st.Rdev), nil
}

// addBacking adds what a loop device, or that of a partition, shows. The file behind a whole one
// is also its identity: nothing else of it stays the same. Tests have no other disks.
func (i *Info) addBacking() (err error) {
	if !strings.HasPrefix(i.Name, "loop") {
		return nil
	}
	path := i.Path
	if i.Partition != 0 {
		path = "/dev/" + i.Parent
	}
	f, err := openNode(path, 0)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENXIO) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	switch now, err := numberOf(f); {
	case err != nil:
		return err
	case now != i.Disk:
		return fmt.Errorf("%s is the node of device %s, not %s: remove it, or mount the host's /dev here", path, now, i.Disk)
	}
	backing, err := loop.BackingOf(f)
	if backing == nil || err != nil {
		return err
	}
	i.Ours, i.Over = backing.Ours, backing.Over
	if i.Partition != 0 {
		return nil
	}
	i.Identities[Backing] = fmt.Sprintf("%s:%d", backing.File.Device, backing.File.Inode)
	if backing.Offset != 0 {
		i.Identities[Backing] += fmt.Sprintf("@%d", backing.Offset)
	}
	return nil
}
