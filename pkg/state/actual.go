package state

import (
	"fmt"
	"iter"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Actual is what the kernel and the backend say of one volume at one moment.
// It is observed before each step and never stored. The zero value of each part
// is unknown: what was not looked at, or could not be. Unknown settles nothing,
// and is never taken for absent.
type Actual struct {
	Device   Device    // the top of the stack, which is what is formatted, mounted and shown
	Layer    string    // that made Device; empty when the volume has no layers, and Device is the backend's
	Lower    []Element // beneath Device, the backend's first; empty when the volume has no layers
	Beneath  Contents  // of the element on which a layer is to be made
	Source   *Source   // of a volume that is mounted without a device; nil for one with a device
	View     Device    // a read-only device over Device, for read-only block targets
	Contents Contents
	Stage    Mountpoint  // at the staging path of the record
	Next     Mountpoint  // at the path of the stage that takes the place of one that ends, if it is another path
	Targets  Mountpoints // at the target paths of the record; one that is not there is unknown
	// Elsewhere is a mount of the volume's file system at another path than the staging
	// path, while it is not mounted there; nil if there is none, or nobody looked.
	Elsewhere *Sighting
	// Others are the paths below kubelet's directory, but for the staging path, at which
	// the volume's file system is mounted. They are looked for when an Unrecorded stage ends.
	Others []string
	// Keepers are what would keep a corrupt file system alive if all mounts at
	// the record's paths went, for humans.
	Keepers []string
	// Smallest is how many bytes a device must have to be formatted as the
	// stage asks; 0 when that is not known.
	Smallest int64
	// Owner is the owner of an inline volume; unknown unless the plan depends on it.
	Owner Owner
	// Unfit is why nothing can be done for a part, whatever the device: the kernel
	// refuses its mount options, or its path is inside another volume. It has only parts
	// for which nothing was done yet, and targets that end in a volume's data, of which
	// nothing is removed. The errors are classified.
	Unfit map[Part]error
}

// Source is what is mounted for a volume that has no device: at each target, the
// file system of that type and source.
type Source struct {
	FSType   string        // "nfs4": a type of the kernel; a bind mount is none
	Source   string        // as the mount table tells it: "server:/export"
	Options  []string      // of the mount, one option each, before those that are asked for
	Deadline time.Duration // of one mount; 0: 2 minutes
}

// Is reports whether m is a mount of the source.
func (s *Source) Is(m Mount) bool {
	return s != nil && !m.Node && m.FSType == s.FSType && m.Source == s.Source && m.Root == "/"
}

// Owner is the owner of an inline volume, according to the backend.
type Owner struct {
	State  OwnerState
	Target string // the owner's target path, as the backend has it
	PodUID string
	Err    error // why it is not known now; nil: nobody asked
}

// OwnerState compares the owner of a volume with the one that a record names.
type OwnerState int

const (
	// OwnerUnknown: the backend was not, or could not be, asked.
	OwnerUnknown OwnerState = iota
	// OwnerNone: there is no such volume.
	OwnerNone
	// OwnerSame: the volume is that of the publish that the record names.
	OwnerSame
	// OwnerOther: it is another publish's, or no inline volume.
	OwnerOther
)

// Element is one device of a stack.
type Element struct {
	Layer  string // that made it; empty for the source, which is the backend's
	Device Device
}

// Stack returns the elements of the volume's device, the source first and Device last.
func (a Actual) Stack() []Element {
	return append(slices.Clip(a.Lower), Element{a.Layer, a.Device})
}

// Lowest returns the first device of the Stack: that of the backend.
func (a *Actual) Lowest() Device {
	if len(a.Lower) > 0 {
		return a.Lower[0].Device
	}
	return a.Device
}

// DeviceNumber identifies a block device; the zero value is no device.
type DeviceNumber struct {
	Major uint32 `json:"major"`
	Minor uint32 `json:"minor"`
}

func (n DeviceNumber) String() string {
	return strconv.FormatUint(uint64(n.Major), 10) + ":" + strconv.FormatUint(uint64(n.Minor), 10)
}

// DeviceState is the condition of a volume's device on this node.
type DeviceState int

const (
	// DeviceUnknown: whether there is a device was not, or could not be, observed.
	DeviceUnknown DeviceState = iota
	// DeviceAbsent: the volume has no device.
	DeviceAbsent
	// DeviceAttached: the plugin's device of the volume is attached.
	DeviceAttached
	// DeviceDetaching: a detach was accepted and completes when the last
	// holder closes the device (autoclear).
	DeviceDetaching
	// DeviceForeign: something that the plugin did not attach uses the volume's backing.
	DeviceForeign
)

var deviceStateNames = [...]string{"unknown", "absent", "attached", "detaching", "foreign"}

func (s DeviceState) String() string {
	if s < 0 || int(s) >= len(deviceStateNames) { // a backend returned it
		return fmt.Sprintf("DeviceState(%d)", int(s))
	}
	return deviceStateNames[s]
}

// Device is the device of a volume, or of one of its layers, on this node.
type Device struct {
	State    DeviceState
	Missing  bool         // the backend knows no such volume
	Path     string       // of the device node, such as /dev/loop3
	Number   DeviceNumber // of the device node
	Size     int64        // bytes; of the device when there is one
	Capacity int64        // bytes that the backend's metadata promises; 0 when unknown
	Unit     int64        // bytes of which it has a whole number, and so grows by more than it is asked for; 0: any size
	Lacks    int64        // bytes of Capacity that its backing was seen to lack, whatever an attached device shows
	ReadOnly bool         // the device refuses writes
	Commands bool         // and yet who has its node may come to write: by commands (SG_IO, NVMe passthrough), or as it is a partition, whose mode may be lost
	Held     bool         // mounted or claimed by somebody, in whatever namespace (an O_EXCL open says EBUSY)
	Holder   string       // what holds the device, or of a foreign device its backing, for humans; empty: not known
	Backing  string       // the path of the file behind the device, whose holes read as zeros; or another name for humans, such as vg/lv; empty when there is none

	// Identity is what the hardware, or the metadata of the volume, says that the
	// device is, whatever its path and number; empty when it says nothing. Another
	// identity is another volume.
	Identity string

	// The durable facts about formatting that live with the data.
	Formatting bool   // a format was begun and its end is not known
	StaleMark  bool   // Formatting is noted on this node alone, and others may have used the device since
	Formatted  string // the fs type of the last format that completed
	MadeUUID   string // of the file system of that format, where no Identity tells one device from another; empty: not known
	Raw        bool   // it was published as a raw block device for writing, and not cleared since
	FormatUUID string // with Formatting: whatever the format leaves bears this UUID; empty: the mark allows to erase anything
	Fresh      bool   // nobody has had it since it was made or cleared: every byte is zero; of a layer: it is stamped new
	WasCleared bool   // it was cleared, and maybe had by others since: it is proved blank however much there is to read

	// Noted: the facts are notes of the node about a device that others made, and which may
	// read as zeros for a while. The mark is set right before the format then, once the device
	// was seen to keep what is written to it.
	Noted  bool
	Trial  string // the UUID of a stamp that may be left on it while there is no mark
	Proved bool   // the step before has proved it blank, and there is no mark yet

	// NeedsSecret: attaching, making, opening or growing it takes a secret that is
	// missing, whether it is attached now or not.
	NeedsSecret bool

	// Shared: another node can reach the same data. Exclusive: the backend has
	// proof that none can write to it now, a reservation or a fence.
	Shared    bool
	Exclusive bool

	// Of the device of a layer only.
	Unmade bool // the element beneath is attached, and does not have the layer yet
	Stray  bool // it has the volume's name, but lies on another element than the volume's

	GrowsOpen bool // while it is open it grows without a secret, whatever NeedsSecret says
	Noise     bool // bytes that were never written read as noise, so that a new one is not blank

	CreatedFor string // the fs type that whoever created the volume asked for; may be empty

	// Err, when set, is why the backend's facts (Missing, Capacity, Backing, CreatedFor
	// and those about formatting) could not be read. State, and the facts about an
	// attached device, are valid nevertheless: they suffice to take it down.
	Err error
}

// Attached reports whether the plugin's device is attached and not being detached.
func (d Device) Attached() bool { return d.State == DeviceAttached }

// Present reports whether the plugin's device is there, even if it is being detached.
func (d Device) Present() bool { return d.Attached() || d.State == DeviceDetaching }

// ContentsKind says what a device was found to hold.
type ContentsKind int

const (
	// ContentsUnread: it is unknown; the device was not read, or there was none.
	ContentsUnread ContentsKind = iota
	// ContentsBlank: provably blank.
	ContentsBlank
	// ContentsFilesystem: a file system that this node can mount.
	ContentsFilesystem
	// ContentsOther: anything else, including what could not be read.
	ContentsOther
	// ContentsUnproven: no known signature, and more that may be data than a
	// look reads; Found says how much.
	ContentsUnproven
)

var contentsKindNames = [...]string{"unread", "blank", "filesystem", "other", "unproven"}

func (k ContentsKind) String() string { return contentsKindNames[k] }

// Contents is what is on a device.
type Contents struct {
	Kind   ContentsKind
	FSType string // of a file system: "ext4", "xfs"
	UUID   string // of a file system
	Size   int64  // bytes that the file system spans on its device
	Found  string // for humans: "ext4 file system", "LUKS header at byte 0", "data at byte 4096"
	Err    error  // the device could not be looked at now
	Origin Origin // of what is on a device with a FormatUUID
	// Unreadable, of ContentsOther: what is there is not known, as a read failed.
	Unreadable bool

	NeedsCheck bool // the superblock asks for a check before the next mount
	Growable   bool // the device has room for the file system to grow into

	// When this kind of file system can grow on this node.
	GrowsMounted   bool
	GrowsUnmounted bool
}

// Origin says whether the contents of a device are what a format left that was begun and
// has not ended (Device.FormatUUID).
type Origin int

const (
	// OriginUnknown: they were not compared, or could not be read completely.
	OriginUnknown Origin = iota
	// OriginFormat: they bear the UUID of the format.
	OriginFormat
	// OriginUnnamed: nothing is recognised, as after a format that was interrupted early.
	OriginUnnamed
	// OriginOther: something is recognised, and does not bear the UUID.
	OriginOther
)

var originNames = [...]string{"unknown", "the format", "unnamed", "other"}

func (o Origin) String() string { return originNames[o] }

// FileType is the type of the file at a path, beneath whatever is mounted there
// if the mount hides it no better than its own root.
type FileType int

const (
	// UnknownFile: the path was not, or could not be, looked at.
	UnknownFile FileType = iota
	// NoFile: the path does not exist.
	NoFile
	// Directory is a directory.
	Directory
	// RegularFile is a regular file.
	RegularFile
	// BlockDevice is a block device node.
	BlockDevice
	// OtherFile is a symbolic link, a socket, a character device or a pipe.
	OtherFile
)

var fileTypeNames = [...]string{"not known", "nothing", "a directory", "a file", "a block device", "a special file"}

func (t FileType) String() string { return fileTypeNames[t] }

// Mountpoint is what is seen at one path.
type Mountpoint struct {
	File   FileType // what a look at the path meets: the root of the top mount, or the file itself
	InFile bool     // of NoFile: the path leads through what is no directory, so that nothing can be made there
	Empty  bool     // nothing is mounted, and the directory has no entries or the file no bytes
	Mounts []Mount  // stacked here, the top first; empty when the path is no mount point
	Apart  bool     // nothing is mounted on the way to the path, as far as a look that finds no mount there can tell
	Err    error    // why the path could not be looked at now; then nothing else is known
}

// Mountpoints is what is seen at some paths, sorted by path. For the few targets that most
// volumes have, a map would need eight times the memory.
type Mountpoints []pathSeen

type pathSeen struct {
	path string
	seen Mountpoint
}

// find returns where a path is, or is to be.
func (all Mountpoints) find(path string) (at int, found bool) {
	return slices.BinarySearchFunc(all, path, func(one pathSeen, path string) int { return strings.Compare(one.path, path) })
}

// At returns what is seen at a path; the zero value, which is unknown, if nobody looked.
func (all Mountpoints) At(path string) (m Mountpoint) {
	if at, found := all.find(path); found {
		m = all[at].seen
	}
	return m
}

// Set notes what is seen at a path. Copies of the slice change with it.
func (all *Mountpoints) Set(path string, m Mountpoint) {
	at, found := all.find(path)
	if !found {
		*all = slices.Insert(*all, at, pathSeen{path: path})
	}
	(*all)[at].seen = m
}

// All returns the paths with what is seen there, in order.
func (all Mountpoints) All() iter.Seq2[string, Mountpoint] {
	return func(yield func(string, Mountpoint) bool) {
		for _, one := range all {
			if !yield(one.path, one.seen) {
				return
			}
		}
	}
}

// Sighting is a mount at a path that no intent names.
type Sighting struct {
	Path  string
	Mount Mount
}

// Mount is one mount at a mount point.
type Mount struct {
	Device        DeviceNumber // the block device under the file system; of a bound device node its own number
	Node          bool         // the mount is a bound device node
	FSType        string
	Source        string
	Root          string // of the mount within its file system; "/" is the whole
	Attributes    Attributes
	Options       string // of the superblock, as the kernel shows them, separated by commas
	SuperReadOnly bool   // the superblock refuses writes, whatever the attributes say
	Pulled        bool   // the block device has gone, and Device is the file system's own number
	Corrupt       bool   // looking at its root fails with ESTALE, ENOTCONN, EIO or the like
	Lost          bool   // Corrupt, with ESTALE or ENOTCONN: it does not work again by itself, as one whose server is away does
	ID            uint64 // which no other mount gets until the next boot (Linux 6.8); 0: not known
}

// Is reports whether m is the whole of the file system on the device, or the
// node of the device itself.
func (m Mount) Is(device DeviceNumber) bool {
	return device != DeviceNumber{} && m.Device == device && (m.Node || m.Root == "/")
}

// Usage is how full a file system is.
type Usage struct{ Bytes, Inodes Amount }

// Amount is a number of bytes, or of inodes.
type Amount struct{ Total, Used, Available int64 }

// FormatAccess tells people how something is attached, staged or published.
func FormatAccess(readOnly bool) string {
	if readOnly {
		return "read-only"
	}
	return "read-write"
}
