package devices

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Inliner is a backend that opts in to inline ephemeral volumes: one is made for a
// pod with its publish, and deleted when that ends. Whoever may create a pod chooses
// the attributes, so no attribute may name a device, a path, a host or anything else
// that the pod may not have. At most one backend of a plugin is an Inliner.
//
// The backend keeps the owner of each volume with its data, durably: it decides what
// an unpublish deletes, also after a reboot and when the records are lost.
//
// Its methods may be called concurrently, also for one id. They may block for as long
// as the storage does; ctx bounds every wait that can be given up. With a ctx that has ended
// before, MakeInline and DeleteVolume change nothing, and return its error.
type Inliner interface {
	// MakeInline makes the volume of an owner, or returns the existing one if it is the
	// owner's and as asked.
	//
	// InvalidArgument: unknown attributes or values; it names the valid ones.
	// AlreadyExists: the volume of that id is another owner's, or not as asked.
	// ResourceExhausted: there is no room. A MakeInline that fails leaves nothing.
	MakeInline(ctx context.Context, r InlineRequest) (InlineVolume, error)
	// InlineOwner returns the owner of a volume; nil: it is no inline volume. NotFound:
	// there is no volume of that id. InvalidArgument: there can be none.
	InlineOwner(ctx context.Context, id string) (*InlineOwner, error)
	// ListInline returns the ids of all inline volumes, and of volumes that may be inline
	// because their facts cannot be read. If not all can be listed, it fails.
	ListInline(ctx context.Context) ([]string, error)
	// DeleteVolume is that of Provisioner.
	DeleteVolume(ctx context.Context, v Volume) error
}

// InlineRequest is what is asked of an inline ephemeral volume.
type InlineRequest struct {
	ID         string
	Owner      InlineOwner
	Attributes map[string]string // the pod author's; without the keys of Kubernetes
	// Secrets are those of the request. No value may get into any log, error or file.
	Secrets Secrets
	// Filesystem returns the type of the file system that a volume of that size is to
	// hold, and how many bytes that needs at least. The type is the pod's, if it names one.
	Filesystem func(bytes int64) (fsType string, smallest int64)
}

// InlineOwner is the one publish that an inline ephemeral volume lives for.
type InlineOwner struct {
	PodUID string
	Target string // target path
}

// InlineVolume is an inline ephemeral volume that is there.
type InlineVolume struct {
	FSType string // of the file system that it is to hold
	Used   bool   // it was formatted before, so it may hold the pod's data
}

// Inliner returns the backend that has the inline ephemeral volumes, and its name;
// nil: none opts in. It is an error when several do.
func (s *Set) Inliner() (name string, in Inliner, err error) {
	for _, other := range s.Names() {
		switch candidate, can := s.backends[other].(Inliner); {
		case can && in != nil:
			return "", nil, state.Errorf(state.FailedPrecondition, "the backends %s and %s both take inline ephemeral volumes: a plugin may have one that does", name, other)
		case can:
			name, in = other, candidate
		}
	}
	return name, in, nil
}
