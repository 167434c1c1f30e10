package devices

import (
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// MountSource is a backend some or all of whose volumes are mounted from a source
// that is no block device, such as a file server. Nothing is attached, read or
// formatted for them: the stage is a record, and each target is a mount of its own,
// because kubelet refuses to unstage a device of which it sees another mount. Find
// tells whether the volume exists (Missing), and returns no device: it is DeviceAbsent,
// which is not the zero value. Such a volume has no raw block access and does not grow on the
// node. It may be staged with every access mode; the engine's Controller makes no volumes
// for several nodes.
type MountSource interface {
	// Source returns what is mounted for a volume; not ok: it has a device. It asks no
	// server. If only the id is known, it uses the id alone, or fails.
	//
	// By type and source the engine knows whose a mount is: no two volumes have the same
	// ones, and a volume has the same ones after a restart, whatever the flags are then.
	Source(ctx context.Context, v Volume) (source state.Source, ok bool, err error)
}

// Source is MountSource's. A backend without a MountSource has devices.
func (s *Set) Source(ctx context.Context, v Volume) (source state.Source, ok bool, err error) {
	b, err := s.of(ctx, v)
	if err != nil {
		return source, false, err
	}
	if m, is := b.(MountSource); is {
		v.Context = state.WithoutKubernetes(v.Context)
		return m.Source(ctx, v)
	}
	return source, false, nil
}
