// Package disk is the backend of existing block devices: disks and partitions that
// somebody else has made, and perhaps attaches to the node.
//
// A volume is attached while a note says so: this volume has this disk, until the next
// boot. So two volumes never have one disk, even if the store is lost. After a detach
// the note still tells which disk the volume is, so that another disk at the same path
// is not taken for it.
//
// Read disk.go first, then attach.go.
package disk

import (
	"cmp"
	"context"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/blockdev"
	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/note"
	"github.com/csi-node/csi-node/pkg/internal/boot"
	"github.com/csi-node/csi-node/pkg/internal/keylock"
	"github.com/csi-node/csi-node/pkg/state"
)

// Name is the backend's name in volume contexts.
const Name = "disk"

// PathKey is the key of the volume context that names a device node. The others
// are the values of blockdev.IdentityKind; several must agree. A publish context
// may have the same keys.
const PathKey = "path"

// ContentsKey is the key of the volume context, or the publish context, that says what may
// be on a disk that was not the volume before: anyContents, or what nobody else may have.
const (
	ContentsKey = "contents"
	anyContents = "any"
)

// Kind returns the backend for the list of a program.
func Kind() devices.Kind {
	return devices.Kind{
		Name: Name,
		// The same as the pool's, because both may be backends of one driver.
		Properties: devices.Properties{NodeLocal: true, CapacityTracked: true},
		Open:       func(_ context.Context, env devices.Environment) (devices.Backend, error) { return New(env) },
	}
}

// Backend is a devices.Backend, and a Grower, Clearer, Owner and Lister. It
// keeps no facts about formatting: the engine does.
type Backend struct {
	claims  note.Dir
	boot    string
	volumes keylock.Map                     // by id
	disks   keylock.Map                     // by number and identity
	raw     func(state.DeviceNumber) error  // see devices.Environment
	volume  func(state.DeviceNumber) string // see devices.Environment.VolumeAt

	mu    sync.Mutex
	hints map[string]state.DeviceNumber // where an identity was last
}

// New returns the backend, which keeps its notes in env.LibDir.
func New(env devices.Environment) (*Backend, error) {
	bootID, err := boot.ID()
	if err != nil {
		return nil, err
	}
	return &Backend{claims: note.Dir(filepath.Join(env.LibDir, "disks")), boot: bootID, raw: env.Raw, volume: env.VolumeAt, hints: map[string]state.DeviceNumber{}}, nil
}

// spec is the disk that contexts ask for.
type spec struct {
	path string
	ids  map[blockdev.IdentityKind]string
	any  bool // its contents may be anything
}

func (s spec) empty() bool { return s.path == "" && len(s.ids) == 0 }

func (s spec) String() string {
	var words []string
	if s.path != "" {
		words = append(words, PathKey+" "+s.path)
	}
	return strings.Join(append(words, inWords(s.ids)...), ", ")
}

// inWords lists identities, the most reliable first.
func inWords(ids map[blockdev.IdentityKind]string) (words []string) {
	for _, kind := range blockdev.IdentityKinds {
		if value := ids[kind]; value != "" {
			words = append(words, string(kind)+" "+value)
		}
	}
	return words
}

// keys returns the keys that a context may name a disk with.
func keys() []string {
	keys := []string{PathKey}
	for _, kind := range blockdev.IdentityKinds {
		keys = append(keys, string(kind))
	}
	return keys
}

// maxID is how many bytes a volume id may have (CSI v1.13: 128, and SHOULD).
const maxID = 1024

// Validate returns InvalidArgument for contexts that name no disk, or no path that
// can be a device's.
func (b *Backend) Validate(v devices.Volume) error {
	s, err := specOf(v)
	if err == nil && s.empty() && (v.Context != nil || v.Publish != nil) {
		return state.Errorf(state.InvalidArgument, "volume %s: the volume context names no disk: it must have one of %s", v.ID, strings.Join(keys(), ", "))
	}
	return err
}

// specOf reads what the contexts name; an empty spec when they name nothing.
func specOf(v devices.Volume) (s spec, err error) {
	if v.ID == "" || len(v.ID) > maxID || strings.ContainsFunc(v.ID, func(r rune) bool { return r < ' ' || r == 0x7f }) {
		return s, state.Errorf(state.InvalidArgument, "volume id %.80q: must have 1 to %d bytes and no control characters", v.ID, maxID)
	}
	s.ids = map[blockdev.IdentityKind]string{}
	switch contents := cmp.Or(v.Context[ContentsKey], v.Publish[ContentsKey]); contents {
	case "", anyContents:
		s.any = contents != ""
	default:
		return s, state.Errorf(state.InvalidArgument, "volume %s: %s is %.80q, and can only be %s", v.ID, ContentsKey, contents, anyContents)
	}
	for _, key := range keys() {
		value, published := v.Context[key], v.Publish[key]
		if value != "" && published != "" && value != published {
			return s, state.Errorf(state.InvalidArgument, "volume %s: %s is %q in the volume context and %q in the publish context", v.ID, key, value, published)
		}
		switch value = cmp.Or(value, published); {
		case value == "":
		case len(value) >= unix.PathMax || strings.ContainsRune(value, 0):
			return s, state.Errorf(state.InvalidArgument, "volume %s: %s: %.80q names nothing: it is too long, or has a NUL", v.ID, key, value)
		case key == PathKey && (!strings.HasPrefix(value, "/dev/") || filepath.Clean(value) != value):
			return s, state.Errorf(state.InvalidArgument, "volume %s: %s: %.200q is no path of a device: it must be below /dev, without . and .. and double slashes", v.ID, key, value)
		case key == PathKey:
			s.path = value
		case blockdev.Normal(blockdev.IdentityKind(key), value) == "":
			return s, state.Errorf(state.InvalidArgument, "volume %s: %s: %q names nothing", v.ID, key, value)
		default:
			s.ids[blockdev.IdentityKind(key)] = value
		}
	}
	return s, nil
}

// claim is the note about one volume.
type claim struct {
	Volume   string            `json:"volume"`
	Context  map[string]string `json:"context"`  // what names the disk, of both contexts
	Identity string            `json:"identity"` // of the disk (blockdev.Info.Identity); empty: it has none
	Attached *attachment       `json:"attached,omitempty"`
}

// attachment is the volume's hold on its disk.
type attachment struct {
	Boot     string             `json:"boot"` // the attachment ends with this boot
	Number   state.DeviceNumber `json:"number"`
	Path     string             `json:"path"` // of the device node
	Sequence uint64             `json:"sequence"`
	ReadOnly bool               `json:"readOnly"` // Attach has set the read-only mode
}

// identityOf returns the identity of the volume's disk: that of the claim as long as the disk has
// it, as the facts about the disk are kept by it, else the best that the disk tells.
func (c claim) identityOf(info blockdev.Info) string {
	if info.Has(c.Identity) {
		return c.Identity
	}
	return info.Identity()
}

// is reports whether the device is the one that was attached, and not another
// that has its number since.
func (c claim) is(info blockdev.Info) bool {
	return c.Attached != nil && c.Attached.Number == info.Number && c.Attached.Sequence == info.Sequence && !c.replaced(info)
}

// replaced reports whether the number of the disk that was attached is another disk's by now:
// what is mounted from it is not the volume's. What has kept its sequence number was
// there all the time, whatever it tells now; but a partition has that of its disk, and
// old kernels tell none.
func (c claim) replaced(now blockdev.Info) bool {
	switch {
	case now.Size == 0, now.Has(c.Identity): // no disk, or the same one again
		return false
	case now.Sequence != c.Attached.Sequence:
		return true
	}
	return now.Identity() != c.Identity && (now.Partition != 0 || now.Sequence == 0)
}

// stands reports whether the disk that was attached is there as it was, or is still
// mounted though it is gone.
func (c claim) stands() bool {
	info, err := blockdev.InfoOf(c.Attached.Number)
	return err == nil && c.is(info) || len(c.mountedAt()) > 0
}

// mountedAt returns where the disk that was attached is mounted, though it may be gone.
func (c claim) mountedAt() []string {
	if info, err := blockdev.InfoOf(c.Attached.Number); err == nil && c.replaced(info) {
		return nil
	}
	return blockdev.MountedAt(c.Attached.Number, c.Attached.Path)
}

// known returns the claim of a volume, without an attachment of an earlier boot, and the
// disk that its contexts name: those of its claim when the volume has none.
// InvalidArgument: there can be no such volume. Internal: the note is damaged; the disk is
// then the one that the contexts name.
func (b *Backend) known(v devices.Volume) (c claim, s spec, err error) {
	if s, err = specOf(v); err != nil {
		return c, s, err
	}
	found, err := b.claims.Read(v.ID, &c)
	if err != nil {
		return claim{}, s, err
	}
	if c.Attached != nil && c.Attached.Boot != b.boot {
		c.Attached = nil
	}
	if found && s.empty() {
		s, err = specOf(devices.Volume{ID: v.ID, Context: c.Context})
	}
	return c, s, err
}

// claimOf returns the claim of a volume on a disk.
func claimOf(v devices.Volume, s spec, identity string) claim {
	c := claim{Volume: v.ID, Context: map[string]string{}, Identity: identity}
	if s.path != "" {
		c.Context[PathKey] = s.path
	}
	for kind, value := range s.ids {
		c.Context[string(kind)] = value
	}
	return c
}

// Owns reports whether a note knows the volume.
func (b *Backend) Owns(_ context.Context, id string) (bool, error) {
	found, err := b.claims.Read(id, &claim{})
	return found && err == nil, nil // a damaged note claims nothing: the mount table decides
}

// Attached returns the disks that volumes have. Damaged notes are left out.
func (b *Backend) Attached(ctx context.Context) ([]devices.Attachment, error) {
	var found []devices.Attachment
	for id := range b.held() {
		d, err := b.Find(ctx, devices.Volume{ID: id})
		if err != nil {
			return nil, err
		}
		if d.Attached() {
			found = append(found, devices.Attachment{Volume: id, Device: d})
		}
	}
	slices.SortFunc(found, func(a, b devices.Attachment) int { return strings.Compare(a.Volume, b.Volume) })
	return found, nil
}

// held returns the claims of the volumes that are attached, by volume. A damaged note must not
// keep all other volumes from their disks: it is left out.
func (b *Backend) held() map[string]claim {
	held := map[string]claim{}
	_ = b.claims.Each(func(id string, read func(any) error) error {
		c := claim{}
		if err := read(&c); err == nil && c.Attached != nil && c.Attached.Boot == b.boot {
			held[id] = c
		}
		return nil
	})
	return held
}
