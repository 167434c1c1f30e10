package luks

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/internal/devnode"
	dm "github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/internal/rawfile"
	"github.com/csi-node/csi-node/pkg/state"
)

// mappers is the device mapper of a node. Names are looked up by the kernel, at a cost
// that does not depend on how many devices there are; all else sysfs tells.
type mappers struct {
	sysfs  string // a directory
	number func(name string) (n state.DeviceNumber, there bool, err error)
}

// host is the device mapper of this node.
var host = mappers{sysfs: "/sys", number: numberOf}

// mapper is a device of the device mapper.
type mapper struct {
	number    state.DeviceNumber
	path      string // of the device node
	uuid      string // as whoever made it has named it
	size      int64  // bytes; 0 before it has a table
	readOnly  bool
	suspended bool
	slaves    []slave
}

// slave is a device on which another stands.
type slave struct {
	name   string
	number state.DeviceNumber
}

// find returns the device of a name; nil: there is none, or one without a table, as a
// cryptsetup leaves it that was killed. The kernel has made no disk of that yet, so that
// nobody can use it; sweep removes it.
func (s mappers) find(name string) (*mapper, error) {
	bare := true
	for range 3 { // it may go, and another come, between two looks
		number, there, err := s.number(name)
		if err != nil || !there {
			return nil, err
		}
		m, have, err := s.read(number)
		switch {
		case errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ENODEV):
		case err != nil:
			return nil, err
		case have == name:
			return m, nil
		default:
			bare = false
		}
	}
	if bare {
		return nil, nil
	}
	return nil, fmt.Errorf("it changes all the time: %w", unix.ESTALE)
}

// sweep removes a device of a name of which find has said that there is none.
func (s mappers) sweep(name string) error {
	if _, there, err := s.number(name); err != nil || !there {
		return err
	}
	return remove(name)
}

// read reads what sysfs has of a device, and its name.
func (s mappers) read(number state.DeviceNumber) (m *mapper, name string, err error) {
	dir, err := filepath.EvalSymlinks(filepath.Join(s.sysfs, "dev/block", number.String()))
	if err != nil {
		return nil, "", err
	}
	m = &mapper{number: number, path: "/dev/" + filepath.Base(dir)}
	values := map[string]string{}
	for _, file := range []string{"dm/name", "dm/uuid", "dm/suspended", "ro", "size"} {
		raw, err := rawfile.Read(filepath.Join(dir, file))
		if err != nil {
			return nil, "", err
		}
		values[file] = strings.TrimSuffix(string(raw), "\n")
	}
	sectors, err := strconv.ParseInt(values["size"], 10, 64) // of 512 bytes, whatever the device's are
	if err != nil {
		return nil, "", fmt.Errorf("the size of %s: %w", m.path, err)
	}
	m.uuid, m.size = values["dm/uuid"], sectors*512
	m.readOnly, m.suspended = values["ro"] != "0", values["dm/suspended"] != "0"
	entries, err := os.ReadDir(filepath.Join(dir, "slaves"))
	if err != nil {
		return nil, "", err
	}
	for _, entry := range entries {
		beneath, err := devnode.ReadNumber(filepath.Join(dir, "slaves", entry.Name(), "dev"))
		if err != nil {
			return nil, "", err
		}
		m.slaves = append(m.slaves, slave{entry.Name(), beneath})
	}
	return m, values["dm/name"], nil
}

// luks returns the UUID of the header from which the device was opened, without
// dashes. ours: cryptsetup has opened it by that name, from a LUKS2 header.
func (m *mapper) luks(name string) (uuid string, ours bool) {
	rest, is := strings.CutPrefix(m.uuid, "CRYPT-LUKS2-")
	uuid, named := strings.CutSuffix(rest, "-"+name)
	return uuid, is && named && uuid != ""
}

// over reports whether the device stands on that one, and on nothing else.
func (m *mapper) over(lower state.Device) bool {
	return lower.Present() && len(m.slaves) == 1 && m.slaves[0].number == lower.Number
}

// beneath names what the device stands on, for humans.
func (m *mapper) beneath() string {
	if len(m.slaves) == 0 {
		return "nothing"
	}
	var names []string
	for _, s := range m.slaves {
		names = append(names, "/dev/"+s.name)
	}
	return strings.Join(names, ", ")
}

// numberOf asks the kernel for the device of a name.
func numberOf(name string) (n state.DeviceNumber, there bool, err error) {
	d, err := dm.Find(name)
	if d == nil || err != nil {
		return n, false, err
	}
	return d.Number, true, nil
}

// remove removes the device of a name, and the node that cryptsetup has made for it
// beside the kernel's. EBUSY: somebody has it open.
func remove(name string) error {
	if err := dm.Remove(name); err != nil {
		return err
	}
	if err := os.Remove("/dev/mapper/" + name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
