package devices

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// Provisioner is a backend that makes volumes and deletes them. Its methods may be called
// concurrently, also for one name or one id. They may block for as long as the storage
// does; ctx bounds every wait that can be given up. With a ctx that has ended before,
// CreateVolume and DeleteVolume change nothing, and return its error. A Provisioner that is
// not the default backend of its plugin must be an Owner, too, because a call to delete a
// volume names only the id.
type Provisioner interface {
	// CheckParameters completes the parameters of a StorageClass: it returns those that
	// make a difference, in one spelling, and adds the defaults of those that were not
	// named. A parameter that it leaves out has its default value. It gets neither the keys
	// of Kubernetes nor BackendKey. Two volumes are alike if their completed parameters are
	// equal. It is pure. InvalidArgument names the unknown parameter or the invalid value,
	// and the valid ones.
	CheckParameters(parameters map[string]string) (map[string]string, error)
	// CreateVolume makes an empty volume, which is durable when CreateVolume returns.
	// If there is one of that name already, it does nothing and returns that one,
	// whatever it is like: the caller compares.
	//
	// OutOfRange: the backend can have no volume of such a size. ResourceExhausted:
	// there is no room now. These leave nothing behind, because the CO may never ask
	// again. After any other failure, the next call of the same name goes on.
	CreateVolume(ctx context.Context, r CreateRequest) (Provisioned, error)
	// DeleteVolume deletes a volume with its data. It returns nil for a volume that does
	// not exist; for an id that no volume can have, and only for that, it may also return
	// InvalidArgument. FailedPrecondition: it is attached, or in use, and stays as it is.
	DeleteVolume(ctx context.Context, v Volume) error
	// GetVolume returns a volume as it is now. NotFound: there is none of that id.
	// InvalidArgument: there can be none. Any other error: the volume cannot be read.
	GetVolume(ctx context.Context, v Volume) (Provisioned, error)
	// ListVolumes returns the ids of all volumes, also of those that GetVolume cannot
	// read. If not all can be listed, it fails.
	ListVolumes(ctx context.Context) ([]string, error)
	// GetCapacity returns how much room there is for volumes with completed parameters: less
	// by what was made, and some seconds after a deletion more by what was deleted.
	GetCapacity(ctx context.Context, parameters map[string]string) (Capacity, error)
}

// CreateRequest is what is asked of a new volume.
type CreateRequest struct {
	// Name is the CO's: 1 to 128 bytes of UTF-8 without control characters, "/" and
	// ".." among what it may hold. Volumes of different names have different
	// ids; VolumeID makes one of a name.
	Name       string
	Parameters map[string]string // as CheckParameters returned them
	Size       SizeRange
	Use        Use
	// Secrets are those of the request. No value may reach a log, an error or a file.
	Secrets Secrets
	// Layers are those that the volume is to have: keys of its volume context. The
	// backend keeps them, and adds them to Provisioned.Context; nil: none.
	Layers map[string]string
}

// Provisioned is a volume as its backend describes it.
type Provisioned struct {
	ID    string
	Name  string // in the request that made it; a request with another name never gets it
	Bytes int64  // size that users of the volume see
	Use   Use    // what it was made for; zero: the backend does not keep that
	// Parameters are the completed ones with which the volume was made, those that
	// the backend did not know then among them; nil: it does not keep them.
	Parameters map[string]string
	// Context is the volume context that the CO is to hand to the nodes: what Attach
	// needs beside the id. The engine adds the name of the backend.
	Context map[string]string
}

// maxID is the length of the longest volume id, in bytes (CSI spec v1.13, "Size Limits").
const maxID = 128

var (
	fitName = regexp.MustCompile(`^[a-z0-9][a-z0-9._-]*$`)
	// derivedName matches what DerivedName returns.
	derivedName = regexp.MustCompile(`^vol-[0-9a-f]{32}$`)
)

// VolumeID returns an id for the volume of a name, for backends that choose the ids:
// prefix, by which an Owner knows its own, and the name itself if that is fit to be the
// name of a file, else one derived from it. No two names have the same id, nor ids that
// differ only in case, which some storage takes for the same. So a name with capitals
// is not fit, and neither is one that looks derived. The prefix is short: what is
// derived has 36 bytes, and no id has more than 128.
func VolumeID(prefix, name string) string {
	if len(prefix)+len(name) <= maxID && fitName.MatchString(name) && !strings.Contains(name, "..") && !derivedName.MatchString(name) {
		return prefix + name
	}
	return prefix + DerivedName(name)
}

// DerivedName is what VolumeID makes of a name that is not fit to be in ids.
func DerivedName(name string) string {
	sum := sha256.Sum256([]byte(name))
	return "vol-" + hex.EncodeToString(sum[:16])
}

// Use is what a volume is made for. The zero value means unknown.
type Use struct {
	Block  bool   // a raw block device
	FSType string // else the type of its file system
}

func (u Use) String() string {
	if u.Block {
		return "a block device"
	}
	return "a file system of type " + u.FSType
}

const (
	// DefaultBytes is the size of a volume for which none is named.
	DefaultBytes = 1 << 30
	// LargestBytes bounds the size of every volume. What layers and whole units add to
	// one does not overflow; the sum of two may.
	LargestBytes = 1 << 62
)

// SizeRange is the range of a volume's size, in bytes. What the engine hands to a
// backend is no less than 0 and no more than LargestBytes, and Required and Smallest
// are no more than Limit if there is one.
type SizeRange struct {
	Required int64 // at least; 0: nobody says
	Limit    int64 // at most; 0: no limit
	Smallest int64 // what the volume's use needs at least
}

// Choose returns the smallest size in the range that is a multiple of unit bytes. If
// none is required, it starts from DefaultBytes, or as much of them as the limit
// allows. OutOfRange: no multiple lies in the range.
func (r SizeRange) Choose(unit int64) (int64, error) {
	required := r.Required
	if required == 0 {
		required = DefaultBytes
		if r.Limit > 0 {
			required = min(DefaultBytes, r.Limit/unit*unit)
		}
	}
	least := max(required, r.Smallest, 1)
	bytes := (least + unit - 1) / unit * unit
	if r.Limit > 0 && bytes > r.Limit {
		return 0, state.Errorf(state.OutOfRange, "sizes are multiples of %d bytes, and none lies between %d and %d", unit, least, r.Limit)
	}
	return bytes, nil
}

// Capacity is the room for new volumes, in bytes of their sizes.
type Capacity struct {
	Available int64 // for all new volumes together
	Largest   int64 // size of one volume, whatever the room; 0: LargestBytes
	Smallest  int64 // size of one volume; 0: any
}

// Default returns the name of the backend of volumes that name none.
func (s *Set) Default() string { return s.byDefault }

// Provisioners returns the names of the backends that make volumes, in order.
func (s *Set) Provisioners() (names []string) {
	for _, name := range s.Names() {
		if _, can := s.backends[name].(Provisioner); can {
			names = append(names, name)
		}
	}
	return names
}

// DeleteVolume lets the volume's backend, which makes volumes, delete it, and forgets what is noted
// about it. One that is not there is deleted.
func (s *Set) DeleteVolume(ctx context.Context, v Volume) error {
	p, err := s.Provisioner(v.Backend)
	if err != nil {
		return err
	}
	facts, _, d, _ := s.noted(ctx, v) // a device that cannot be found can be deleted
	err = p.DeleteVolume(ctx, v)
	if class := state.ClassOf(err); err != nil && class != state.NotFound && class != state.InvalidArgument {
		return err
	}
	if facts == nil || err != nil && !d.Missing { // then it is somebody else's
		return nil
	}
	return facts.Forget(context.WithoutCancel(ctx), v, d)
}

// Provisioner returns the backend of a name as one that makes volumes.
// InvalidArgument: there is no such backend, or it makes none.
func (s *Set) Provisioner(name string) (Provisioner, error) {
	b := s.backends[name]
	if b == nil {
		return nil, state.Errorf(state.InvalidArgument, "%s: %.200q is no backend of this plugin, which has %s", BackendKey, name, strings.Join(s.Names(), ", "))
	}
	p, can := b.(Provisioner)
	if !can {
		return nil, state.Errorf(state.InvalidArgument, "%s: %s makes no volumes; those that do are: %s", BackendKey, name, strings.Join(s.Provisioners(), ", "))
	}
	return p, nil
}
