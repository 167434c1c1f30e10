// Package lvm is the backend of volumes that are logical volumes of a volume group: thick
// ones, which have all their extents, and thin ones in a thin pool.
//
// What must outlive a reboot is in tags of the logical volume, so it goes with the group
// to another node. A volume's id holds the UUID of its group: another machine's group of
// the same name is never taken for it.
//
//	Find ──> device mapper (one ioctl), report of the group in memory
//	else ──> the group's turn ──> lvm, limited to the group's own disks ──> fsync of the disks
//
// A volume at rest is observed without running a program. A group has one report, which
// is read again after a change. It tells of nothing that a loss of power would undo: what
// is seen for the first time, such as a change whose flush failed, or one of a process
// that was killed, is flushed before it is told.
//
// Whatever runs lvm takes the group's turn; an lvm that hangs is killed after a while, and
// until it is gone it holds up its own group alone. A group is locked before it is used: a
// second plugin with the same driver name would take the devices of the first for
// leftovers.
//
// A new thick volume shows the bytes of the earlier users of its extents. It has the tag
// "unzeroed" from the moment at which it is made, and is not attached before it is zeroed.
// Extents that a volume grows by are zeroed before they become part of it.
//
// LVM's own backups of the metadata (vgcfgrestore) bring that tag back, and the data stays: so
// it is noted below --lib-dir which volumes were used on this node, and these are not zeroed by it.
//
// Read lvm.go first, then groups.go, attach.go and provision.go.
package lvm

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"github.com/spf13/pflag"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/note"
	"github.com/csi-node/csi-node/pkg/internal/hang"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
)

// Name is the backend's name in volume contexts, records and ids.
const Name = "lvm"

// Kind returns the backend for the list of a program.
func Kind() devices.Kind {
	groups := ""
	return devices.Kind{
		Name: Name,
		// The same as the pool's, because both may be backends of one driver.
		Properties: devices.Properties{NodeLocal: true, CapacityTracked: true},
		Flags: func(f *pflag.FlagSet) {
			f.StringVar(&groups, "lvm-groups", "", "LVM volume groups in which volumes may be, with commas between them; a node need not have all of them; empty: none")
		},
		Open: func(_ context.Context, env devices.Environment) (devices.Backend, error) { return New(groups, env) },
	}
}

// Backend is a devices.Backend, a Grower, Formatter, Eraser, Clearer, Provisioner, Owner,
// Lister, Locator, Checker, Meter and io.Closer. Its methods may be called concurrently.
type Backend struct {
	names       []string // of the volume groups
	driver      string
	stateDir    string
	observeOnly bool
	wanted      func() []devices.Volume
	lvm         runner
	disks       finder
	flush       func(paths []string) error // makes what is on disks durable
	lockDir     string
	used        note.Dir // of volumes that were attached here, by their UUID; empty: nothing is noted

	volumes keylock.Map          // turns, by volume id
	turns   hang.Calls[struct{}] // by name of the group

	mu       sync.Mutex
	groups   map[string]*groupState // by name
	locks    map[string]*os.File    // by UUID of the group
	deleting map[string]bool        // logical volumes that are being removed, by UUID
	zeroing  map[string]bool        // devices that this process writes zeros to, by name in the device mapper
}

var fitGroup = regexp.MustCompile(`^[A-Za-z0-9+_.][A-Za-z0-9+_.-]*$`)

// New returns the backend of the groups whose names are given with commas between them.
func New(groups string, env devices.Environment) (*Backend, error) {
	b := &Backend{
		driver: env.DriverName, stateDir: env.StateDir, observeOnly: env.ObserveOnly, wanted: env.Wanted, lvm: newRunner("lvm", commandLimit), disks: newFinder(env.Raw), flush: flush,
		lockDir: lockDir, groups: map[string]*groupState{}, locks: map[string]*os.File{}, zeroing: map[string]bool{}, deleting: map[string]bool{},
	}
	if env.LibDir != "" {
		b.used = note.Dir(filepath.Join(env.LibDir, "lvm"))
	}
	for _, name := range strings.FieldsFunc(groups, func(r rune) bool { return r == ',' || r == ' ' }) {
		if !fitGroup.MatchString(name) || b.groups[name] != nil {
			return nil, state.Errorf(state.InvalidArgument, "--lvm-groups %q: must be names of volume groups, each once, with commas between them", groups)
		}
		b.names = append(b.names, name)
		b.groups[name] = &groupState{}
	}
	if groups != "" && len(b.names) == 0 {
		return nil, state.Errorf(state.InvalidArgument, "--lvm-groups %q: names no volume group; leave it empty for none", groups)
	}
	return b, nil
}

// volumeID is what a volume id says.
type volumeID struct {
	group string // UUID, without dashes
	name  string // of the logical volume
}

const idPrefix = "lvm-"

var (
	fitID        = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9+._-]{0,127}$`)
	ownID        = regexp.MustCompile(`^` + idPrefix + `([A-Za-z0-9]{32})-([A-Za-z0-9][A-Za-z0-9+._-]*)$`)
	reservedName = regexp.MustCompile(`^snapshot|^pvmove|_`) // all that LVM reserves begins so, or has a "_" (lvm(8))
)

// parseID reads the id of a volume. own is false for an id that no volume of a group can
// have. InvalidArgument: it is not an id at all.
func parseID(id string) (v volumeID, own bool, err error) {
	if !fitID.MatchString(id) || strings.Contains(id, "..") {
		return v, false, state.Errorf(state.InvalidArgument, "volume id %.200q: must be 1 to 128 letters, digits, dots, dashes and underscores, begin with a letter or digit, and hold no two dots in a row", id)
	}
	m := ownID.FindStringSubmatch(id)
	if m == nil {
		return v, false, nil
	}
	return volumeID{m[1], m[2]}, true, nil
}

func (v volumeID) String() string { return idPrefix + v.group + "-" + v.name }

// longestName leaves room for the name of the group: the device mapper's names have 127
// bytes, and each dash counts twice there.
const longestName = 63

// logicalName returns the name of the logical volume for a CO's name: that itself where
// it can be, else one derived from it.
func logicalName(name string) string {
	if lv := devices.VolumeID("", name); len(escape(lv)) <= longestName && !reservedName.MatchString(lv) {
		return lv
	}
	return devices.DerivedName(name)
}

// escape doubles the dashes of a name, as LVM does in the device mapper.
func escape(name string) string { return strings.ReplaceAll(name, "-", "--") }

// deviceName is the name of a logical volume in the device mapper.
func deviceName(group, lv string) string { return escape(group) + "-" + escape(lv) }

// splitDeviceName is the inverse of deviceName. LVM's hidden volumes have a second single
// dash, and are not ok.
func splitDeviceName(name string) (group, lv string, ok bool) {
	parts := strings.Split(strings.ReplaceAll(name, "--", "/"), "-")
	if len(parts) != 2 {
		return "", "", false
	}
	return strings.ReplaceAll(parts[0], "/", "-"), strings.ReplaceAll(parts[1], "/", "-"), true
}

const uuidPrefix = "LVM-" // of LVM's devices in the device mapper; the UUIDs of group and volume follow

// Validate returns InvalidArgument for an id that no volume can have.
func (b *Backend) Validate(v devices.Volume) error {
	_, _, err := parseID(v.ID)
	return err
}

// Owns reports whether an id is of the form that this backend gives.
func (b *Backend) Owns(_ context.Context, id string) (bool, error) {
	_, own, err := parseID(id)
	return own && err == nil, nil
}

// active returns the device of a volume and the name of its group, whether LVM answers or
// not, and whether the group is one of --lvm-groups or not; nil: it has none.
func (b *Backend) active(v volumeID) (d *mapper.Device, group string, err error) {
	for _, name := range b.names {
		d, err := mapper.Find(deviceName(name, v.name))
		if err != nil {
			return nil, "", err
		}
		if d != nil && strings.HasPrefix(d.UUID, uuidPrefix+v.group) {
			return d, name, nil
		}
	}
	// Its group may have another name by now, or be left out of the flag.
	if uuid, known := b.uuidOf(v); known {
		if uuid == "" {
			return nil, "", nil
		}
		d, err := mapper.FindUUID(uuidPrefix + v.group + uuid)
		if d == nil || err != nil {
			return nil, "", err
		}
		group, lv, ok := splitDeviceName(d.Name)
		if !ok || lv != v.name { // it was renamed, and is another volume now
			return nil, "", nil
		}
		return d, group, nil
	}
	names, err := mapper.Having(uuidPrefix + v.group)
	if err != nil {
		return nil, "", err
	}
	for _, name := range names {
		if group, lv, ok := splitDeviceName(name); ok && lv == v.name {
			d, err := mapper.Find(name)
			return d, group, err
		}
	}
	return nil, "", nil
}

// uuidOf returns the UUID of the logical volume by the last report of its group; empty:
// the group has none of that name. known is false if there is no report.
func (b *Backend) uuidOf(v volumeID) (uuid string, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, g := range b.groups {
		if g.report != nil && g.report.uuid == v.group {
			return g.report.volumes[v.name].uuid, true
		}
	}
	return "", false
}

// VolumeAt returns the id of the volume that a device shows, as far as the last report
// knows it.
func (b *Backend) VolumeAt(number state.DeviceNumber) string {
	name, uuid := mapper.At(number)
	group, lv, ok := splitDeviceName(name)
	if !ok || !strings.HasPrefix(uuid, uuidPrefix) {
		return ""
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.groups[group]
	if g == nil || g.report == nil || !strings.HasPrefix(uuid, uuidPrefix+g.report.uuid) {
		return ""
	}
	if v, has := g.report.volumes[lv]; !has || !b.own(v) {
		return ""
	}
	return volumeID{g.report.uuid, lv}.String()
}
