package blockdev

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	"github.com/csi-node/csi-node/pkg/state"
)

// sysfs is a directory with the kernel's tree of devices.
type sysfs string

// host is that of this machine.
const host sysfs = "/sys"

// numbers returns the block devices that there are, without those that the
// kernel hides, such as the single paths of a multipath NVMe namespace.
func (s sysfs) numbers() (numbers []state.DeviceNumber, err error) {
	entries, err := os.ReadDir(filepath.Join(string(s), "class/block"))
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		n, err := devnode.ReadNumber(filepath.Join(string(s), "class/block", entry.Name(), "dev"))
		switch {
		case errors.Is(err, os.ErrNotExist): // it is hidden, or went since it was listed
		case err != nil:
			return nil, err
		default:
			numbers = append(numbers, n)
		}
	}
	return numbers, nil
}

// infoOf reads what sysfs has of a device. It reads the sequence number before and after, and which
// directory it is, and starts again if one has changed: the device became another one meanwhile. A
// partition has the sequence number of its disk, and a directory of its own each time that the
// partition table is read.
func (s sysfs) infoOf(number state.DeviceNumber) (Info, error) {
	const attempts = 3
	link := filepath.Join(string(s), "dev/block", number.String())
	for range attempts {
		before, err := os.Stat(link)
		if err != nil {
			return Info{}, err
		}
		info, err := s.read(number)
		if after, statErr := os.Stat(link); statErr != nil || !os.SameFile(before, after) {
			continue
		}
		if err != nil {
			return Info{}, err
		}
		if again, err := sequenceOf(info.dir); err == nil && again == info.Sequence {
			return info.Info, nil
		}
	}
	return Info{}, fmt.Errorf("device %s: it changes all the time: %w", number, unix.ESTALE)
}

type entry struct {
	Info
	dir string // of the device; that of its disk is around it if it is a partition
}

func (s sysfs) read(number state.DeviceNumber) (e entry, err error) {
	link := filepath.Join(string(s), "dev/block", number.String())
	if e.dir, err = filepath.EvalSymlinks(link); err != nil {
		return e, err
	}
	e.Info = Info{Number: number, Disk: number, Name: filepath.Base(e.dir), Identities: map[IdentityKind]string{}}
	if e.Partition, err = e.number("partition"); err != nil {
		return e, err
	}
	if e.Partition != 0 {
		disk := filepath.Dir(e.dir)
		e.Parent = filepath.Base(disk)
		if e.Disk, err = devnode.ReadNumber(filepath.Join(disk, "dev")); err != nil {
			return e, err
		}
	}
	if e.Sequence, err = sequenceOf(e.dir); err != nil {
		return e, err
	}
	sectors, err := e.number("size") // of 512 bytes, whatever the device's are
	if err != nil {
		return e, err
	}
	e.Size = int64(sectors) * 512
	readOnly, err := e.number("ro")
	if err != nil {
		return e, err
	}
	e.ReadOnly = readOnly != 0
	if e.Holders, err = names(filepath.Join(e.dir, "holders")); err != nil {
		return e, err
	}
	if err := e.partitions(); err != nil {
		return e, err
	}
	return e, e.identify()
}

// sequenceOf returns the sequence number of a disk, or of the disk of a partition.
func sequenceOf(dir string) (uint64, error) {
	for _, dir := range []string{dir, filepath.Dir(dir)} {
		text, err := read(filepath.Join(dir, "diskseq"))
		if err != nil {
			return 0, err
		}
		if text != "" {
			return strconv.ParseUint(text, 10, 64)
		}
	}
	return 0, nil
}

// partitions finds the partitions of a disk, which are directories in its own.
func (e *entry) partitions() error {
	entries, err := os.ReadDir(e.dir)
	if err != nil {
		return err
	}
	for _, sub := range entries {
		if !sub.IsDir() || !strings.HasPrefix(sub.Name(), e.Name) {
			continue
		}
		if text, err := read(filepath.Join(e.dir, sub.Name(), "partition")); err != nil || text != "" {
			e.Partitions = append(e.Partitions, sub.Name())
		}
	}
	return nil
}

// identify reads whatever the device tells of what it is.
func (e *entry) identify() error {
	values, err := e.uevent()
	if err != nil {
		return err
	}
	e.Path = "/dev/" + values["DEVNAME"]
	if values["DEVNAME"] == "" {
		e.Path = "/dev/" + strings.ReplaceAll(e.Name, "!", "/")
	}
	if e.Partition != 0 {
		e.add(PartUUID, values["PARTUUID"]) // Linux 6.13
		return e.identifyByDisk()
	}
	for _, file := range []struct {
		kind IdentityKind
		name string
	}{
		{NVMeUUID, "uuid"}, {NGUID, "nguid"}, {EUI, "eui"}, {WWID, "wwid"}, {WWID, "device/wwid"}, {DMUUID, "dm/uuid"}, {Serial, "serial"}, {Serial, "device/serial"},
	} {
		if e.Identities[file.kind] != "" {
			continue
		}
		text, err := read(filepath.Join(e.dir, file.name))
		if err != nil {
			return err
		}
		e.add(file.kind, text)
	}
	if e.Identities[WWID] == "" {
		page, err := readAll(filepath.Join(e.dir, "device/vpd_pg83"))
		if err != nil {
			return err
		}
		e.add(WWID, designator(page))
	}
	if e.Identities[Serial] == "" {
		page, err := readAll(filepath.Join(e.dir, "device/vpd_pg80"))
		if err != nil {
			return err
		}
		if len(page) > vpdHeader {
			e.add(Serial, string(page[vpdHeader:]))
		}
	}
	return nil
}

// identifyByDisk identifies a partition by its disk and the place at which it begins. Some
// kernels do not tell a partition's own UUID. On kernels that do, both identities are
// added, so that a volume is recognised after an upgrade of the kernel.
func (e *entry) identifyByDisk() error {
	disk := entry{Info: Info{Name: e.Parent, Identities: map[IdentityKind]string{}}, dir: filepath.Dir(e.dir)}
	if err := disk.identify(); err != nil {
		return err
	}
	start, err := e.number("start")
	if err != nil {
		return err
	}
	for _, kind := range IdentityKinds {
		if value := disk.Identities[kind]; value != "" {
			e.Identities[kind] = fmt.Sprintf("%s-part%d@%d", value, e.Partition, start)
		}
	}
	return nil
}

// add adds an identity, unless it is empty.
func (e *entry) add(kind IdentityKind, value string) {
	value = Normal(kind, value)
	if strings.Trim(value, "0-.") != "" {
		e.Identities[kind] = value
	}
}

// saysNothing reports whether an identity is one that any device may have: zeros, or nothing, behind
// the prefix of its kind, or the number of a partition in a table without a signature of its own.
// It is none that Identity returns, and one that was noted by an earlier version is still found.
func saysNothing(kind IdentityKind, value string) bool {
	value, _, _ = strings.Cut(value, "-part")
	switch kind {
	case WWID:
		if _, rest, ok := strings.Cut(value, "."); ok {
			value = rest
		}
	case PartUUID:
		if rest, ok := strings.CutPrefix(value, "00000000-"); ok && len(rest) == 2 {
			return true
		}
	}
	return strings.Trim(value, "0-._") == ""
}

func (e *entry) uevent() (map[string]string, error) {
	text, err := read(filepath.Join(e.dir, "uevent"))
	if err != nil {
		return nil, err
	}
	values := map[string]string{}
	for line := range strings.Lines(text) {
		if key, value, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "="); ok {
			values[key] = value
		}
	}
	return values, nil
}

// number reads a file that holds a number; 0 when there is none.
func (e *entry) number(name string) (int, error) {
	text, err := read(filepath.Join(e.dir, name))
	if err != nil || text == "" {
		return 0, err
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, fmt.Errorf("%s of %s: %w", name, e.Name, err)
	}
	return n, nil
}

// vpdHeader is the length of the header of a page of SCSI's vital product data.
const vpdHeader = 4

// designator returns the name of a logical unit in the device identification page
// of SCSI (SPC-4, 7.8.6), chosen as the kernel's wwid is: NAA before EUI-64
// before T10, the longest of a kind.
func designator(page []byte) (name string) {
	const t10, eui, naa = 1, 2, 3
	rank := 0
	for rest := page[min(vpdHeader, len(page)):]; len(rest) >= 4; {
		size := int(rest[3])
		if len(rest) < 4+size {
			break
		}
		kind, association, value := int(rest[1]&0xf), rest[1]>>4&3, rest[4:4+size]
		rest = rest[4+size:]
		if association != 0 || kind < t10 || kind > naa || kind<<8+size <= rank {
			continue
		}
		rank = kind<<8 + size
		switch kind {
		case t10:
			name = "t10." + string(value)
		case eui:
			name = "eui." + hex.EncodeToString(value)
		case naa:
			name = "naa." + hex.EncodeToString(value)
		}
	}
	return name
}

// read is readAll for text, without white space around it.
func read(path string) (string, error) {
	raw, err := readAll(path)
	return strings.TrimSpace(string(raw)), err
}

// readAll returns the contents of a file; nothing when there is none, or the
// device has nothing to say there. os.ErrNotExist: the device is going away.
func readAll(path string) ([]byte, error) {
	raw, err := os.ReadFile(path)
	for _, nothing := range []error{os.ErrNotExist, unix.ENOTDIR, unix.EINVAL, unix.ENXIO, unix.EOPNOTSUPP} {
		if errors.Is(err, nothing) {
			return nil, nil
		}
	}
	if errors.Is(err, unix.ENODEV) {
		return nil, fmt.Errorf("%w: %w", err, os.ErrNotExist)
	}
	return raw, err
}

func names(dir string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, err
}
