// Package luks is the layer of encrypted volumes: a LUKS2 header at the beginning of
// the element beneath, and behind it a dm-crypt device, which the program cryptsetup
// opens. Volumes have it whose context says "encryption: luks2".
//
//	header.go      what the header on the element says, read without a program
//	mapper.go      the volume's dm-crypt device, as the kernel tells of it
//	cryptsetup.go  runs the program; passphrases reach it through pipes alone
//	create.go      makes the header, stamped new, and takes the stamp away
//	open.go        opens, changes passphrases, closes, grows and erases
//
// The passphrase comes with the secrets of any call. It is needed to make and to open
// a layer, and for nothing else: an open device grows, is looked at and is closed
// without it.
package luks

import (
	"context"
	"crypto/sha256"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	dm "github.com/csi-node/csi-node/pkg/internal/mapper"
	"github.com/csi-node/csi-node/pkg/state"
)

const (
	// EncryptionKey is the parameter of a StorageClass, and the key of a volume
	// context, that asks for the layer. Its one value is LUKS2.
	EncryptionKey = "encryption"
	LUKS2         = "luks2"

	// PassphraseKey and PreviousKey are keys of the secrets. The previous passphrase
	// is named while a passphrase is being changed.
	PassphraseKey = "encryptionPassphrase"
	PreviousKey   = "encryptionPassphrasePrevious"

	// HeaderBytes is how much of the element beneath a header takes that Create made.
	HeaderBytes = 16 << 20
)

// Layer is the layer, for all volumes of one driver. Its methods may be called
// concurrently for different volumes.
type Layer struct {
	owner   string             // the driver: another has volumes of the same ids
	mappers mappers            // the kernel's
	program string             // cryptsetup
	cost    []string           // what a guess at a passphrase is to cost, as options of cryptsetup
	slots   chan struct{}      // one is held while a passphrase is tried
	headers *keylock.Map       // one program at a time changes the header of an element
	sync    func(string) error // makes the header on an element durable
}

// maxConcurrent is how many passphrases are tried at a time: each try takes the memory
// that the header says, which is costMiB if Create made it.
const (
	maxConcurrent = 2
	costMiB       = 64
)

// argon2id is the cost of a guess: RFC 9106's choice where memory is scarce, with the
// four passes that cryptsetup wants at least. It is fixed, so that all nodes agree on
// it, and nothing is measured while a pod waits.
var argon2id = []string{"--pbkdf", "argon2id", "--pbkdf-memory", fmt.Sprint(costMiB << 10), "--pbkdf-parallel", "4", "--pbkdf-force-iterations", "4"}

// New returns the layer. From now on the process leaves no core file, for it has
// passphrases in its memory; nor do its children.
func New() *Layer {
	noCore()
	return &Layer{mappers: host, program: "cryptsetup", cost: argon2id, slots: make(chan struct{}, maxConcurrent), headers: &keylock.Map{}, sync: syncDevice}
}

// noCore keeps the kernel from writing the memory of the process to a file, and from
// handing it to a program: only a limit of one byte does both (core(5)).
func noCore() {
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_CORE, &limit) == nil && limit.Cur > 1 {
		_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{Cur: 1, Max: limit.Max}) // lowering it is always allowed
	}
}

// In implements devices.PlacedLayer: the devices are named after the driver.
func (l *Layer) In(env devices.Environment) devices.Layer {
	placed := *l
	placed.owner = env.DriverName
	return &placed
}

// Name implements devices.Layer.
func (*Layer) Name() string { return LUKS2 }

// Wanted implements devices.Layer.
func (*Layer) Wanted(v devices.Volume) bool { return v.Context[EncryptionKey] == LUKS2 }

// ContextKey implements devices.ClassLayer.
func (*Layer) ContextKey() string { return EncryptionKey }

// Validate implements devices.ClassLayer: a misspelled value must not become a volume
// without encryption.
func (*Layer) Validate(v devices.Volume) error {
	if value, named := v.Context[EncryptionKey]; named && value != LUKS2 {
		return state.Errorf(state.InvalidArgument, "%s: %.80q: there is %s; leave it out for a volume without encryption", EncryptionKey, value, LUKS2)
	}
	return nil
}

// Overhead implements devices.ClassLayer.
func (*Layer) Overhead() int64 { return HeaderBytes }

// device is the name of the volume's device in the device mapper: the same whatever
// the volume stands on, of 44 characters (the kernel takes 127), and no other
// volume's on the node.
func (l *Layer) device(v devices.Volume) string {
	sum := sha256.Sum256([]byte(l.owner + "\x00" + v.ID))
	return dm.LayerName([20]byte(sum[:20]))
}

// Find implements devices.Layer. It reads the header, and asks the kernel for the
// device of the volume's name; it runs no program.
func (l *Layer) Find(_ context.Context, lower state.Device, v devices.Volume) (state.Device, error) {
	d := state.Device{State: state.DeviceAbsent, NeedsSecret: v.Secrets.Get(PassphraseKey) == "", GrowsOpen: true, Noise: true}
	name := l.device(v)
	m, err := l.mappers.find(name)
	if err != nil {
		return state.Device{}, fmt.Errorf("volume %s: the device %s: %w", v.ID, name, err)
	}
	if m == nil && !l.Wanted(v) {
		return d, nil // nothing depends on what a volume that is not encrypted holds
	}
	var h header
	if lower.Attached() {
		if h, err = readHeader(lower, l.Wanted(v)); err != nil {
			d.Err = fmt.Errorf("volume %s: the LUKS2 header on %s: %w", v.ID, lower.Path, err)
		}
		d.Unmade, d.Fresh = err == nil && !h.made, h.made && h.fresh()
		d.Capacity = h.room(lower.Size)
	}
	if m == nil {
		return d, nil
	}
	d.State, d.Path, d.Number, d.Size, d.ReadOnly = state.DeviceAttached, m.path, m.number, m.size, m.readOnly
	uuid, ours := m.luks(name)
	switch {
	case !ours:
		d.State, d.Unmade = state.DeviceForeign, false
		d.Holder = fmt.Sprintf("the device %s (%s), which is no LUKS2 device", name, m.path)
	case !m.over(lower):
		d.State, d.Stray, d.Unmade = state.DeviceForeign, true, false
		d.Holder = fmt.Sprintf("the device %s (%s), which stands on %s", name, m.path, m.beneath())
	case m.suspended && d.Err == nil:
		d.Err = state.Errorf(state.Unavailable, "volume %s: the device %s (%s) is suspended: let whoever did that end it (cryptsetup luksResume, dmsetup resume)", v.ID, name, m.path)
	case h.made && strings.ReplaceAll(h.uuid, "-", "") != uuid:
		d.Unmade = true // the header was replaced beneath the open device
	}
	return d, nil
}
