package nodeserver

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/state"
)

// volumeID checks the id in a request that says nothing else about the volume. An id
// with a record passes: it was checked before, perhaps by another version.
func (s *Server) volumeID(id string) error {
	if id == "" {
		return state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	if s.Records.Get(id) != nil {
		return nil
	}
	return s.Backends.ValidateID(id)
}

// volume checks what a request says about the volume. A backend that this plugin lacks
// is no error in the request if the volume has a record of it: another version of the
// plugin may have the backend again.
func (s *Server) volume(v devices.Volume) error {
	if v.ID == "" {
		return state.Errorf(state.InvalidArgument, "volume_id is missing")
	}
	if _, named := v.Context[devices.BackendKey]; named && v.Context[state.EphemeralKey] == "true" { // anybody who may create a pod sets it
		return state.Errorf(state.InvalidArgument, "volume %s: volume_context: %s: an inline ephemeral volume chooses no backend", v.ID, devices.BackendKey)
	}
	v.Backend = cmp.Or(v.Backend, s.Backends.Named(v))
	if record := s.Records.Get(v.ID); record != nil && record.Backend == v.Backend && !slices.Contains(s.Backends.Names(), v.Backend) {
		return nil
	}
	return s.Backends.Validate(v)
}

// volumeRequest is what requests to stage and to publish say about the volume.
type volumeRequest interface {
	GetVolumeId() string
	GetVolumeContext() map[string]string
	GetPublishContext() map[string]string
	GetSecrets() map[string]string
}

// volumeOf returns what a request says about the volume. An inline one is of the backend that makes
// those.
func (s *Server) volumeOf(req volumeRequest) devices.Volume {
	v := devices.Volume{ID: req.GetVolumeId(), Context: req.GetVolumeContext(), Publish: req.GetPublishContext(), Secrets: devices.NewSecrets(req.GetSecrets())}
	if s.Inline != nil && v.Context[state.EphemeralKey] == "true" {
		v.Backend = s.Inline.Backend
	}
	return v
}

// remembering keeps the secrets of a request if its edit succeeded, and returns err.
func (s *Server) remembering(req interface {
	GetVolumeId() string
	GetSecrets() map[string]string
}, err error) error {
	if err == nil {
		s.Reconciler.Remember(req.GetVolumeId(), req.GetSecrets())
	}
	return err
}

// path checks a required path of a request, at which something is to be made or
// removed. One that the record of the volume has was checked before, and is looked at by
// the worker.
func (s *Server) path(id, field, path string) error {
	if err := wellFormed(field, path); err != nil || s.Records.IsAt(id, path) {
		return err
	}
	return s.Paths.Check(path)
}

func wellFormed(field, path string) error {
	switch {
	case path == "":
		return state.Errorf(state.InvalidArgument, "%s is missing", field)
	case !filepath.IsAbs(path), filepath.Clean(path) != path, strings.ContainsRune(path, 0):
		return state.Errorf(state.InvalidArgument, "%s %.200q is not an absolute path in its shortest form", field, path)
	}
	return nil
}

// volumePath checks the path of a request about a volume. A relative path is not
// invalid, because csi-sanity sends one: there is no volume at it.
func (s *Server) volumePath(id, path string) error {
	if path != "" && !filepath.IsAbs(path) {
		return state.Errorf(state.NotFound, "volume %s: not at the path %.200q, which is relative", id, path)
	}
	return wellFormed("volume_path", path)
}

// asked checks and translates what requests to stage and to publish have in common, in
// the order in which the specification wants it checked.
func (s *Server) asked(ctx context.Context, req interface {
	volumeRequest
	GetVolumeCapability() *csi.VolumeCapability
}, field, path string) (c state.Capability, readOnly bool, joined map[string]string, err error) {
	if err = s.volume(s.volumeOf(req)); err != nil {
		return
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("volume %s: %w", req.GetVolumeId(), err)
		}
	}()
	if err = s.path(req.GetVolumeId(), field, path); err != nil {
		return
	}
	if c, readOnly, err = s.capability(ctx, s.volumeOf(req), req.GetVolumeCapability()); err != nil {
		return
	}
	joined, err = s.volumeContext(s.volumeOf(req))
	return
}

// modesReading are the access modes in which nobody writes.
var modesReading = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
}

// capability normalises the capability that is asked for of a volume, and reports whether it
// is read-only. An empty fs_type stays empty.
func (s *Server) capability(ctx context.Context, v devices.Volume, c *csi.VolumeCapability) (state.Capability, bool, error) {
	none := state.Capability{}
	if c == nil {
		return none, false, state.Errorf(state.InvalidArgument, "volume_capability is missing")
	}
	mode := c.GetAccessMode().GetMode()
	name, known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]
	if c.AccessMode == nil || mode == csi.VolumeCapability_AccessMode_UNKNOWN || !known {
		return none, false, state.Errorf(state.InvalidArgument, "volume_capability.access_mode is missing or unknown")
	}
	reading := slices.Contains(modesReading, mode)
	switch access := c.GetAccessType().(type) {
	case *csi.VolumeCapability_Block:
		return state.Capability{Access: state.BlockAccess, Mode: name}, reading, nil
	case *csi.VolumeCapability_Mount:
		out := state.Capability{Access: state.MountAccess, Mode: name, FSType: access.Mount.GetFsType(), Flags: access.Mount.GetMountFlags()}
		if err := s.checkFSType(ctx, v, out.FSType); err != nil {
			return none, false, err
		}
		if access.Mount.GetVolumeMountGroup() != "" {
			return none, false, state.Errorf(state.InvalidArgument, "volume_mount_group: the file systems of this node take no group at mount; leave it to fsGroupPolicy File")
		}
		flags, err := state.ParseFlags(out.Flags)
		return out, reading || flags.Set&state.ReadOnly != 0, err
	}
	return none, false, state.Errorf(state.InvalidArgument, "volume_capability.access_type is missing")
}

// checkFSType returns InvalidArgument for a file system that nobody can make on the volume's
// device. Where there is none, the worker compares the type with that of the source.
func (s *Server) checkFSType(ctx context.Context, v devices.Volume, fsType string) error {
	types := s.Filesystems.Types()
	if fsType == "" || slices.Contains(types, fsType) {
		return nil
	}
	if _, mounted, err := s.Backends.Source(ctx, v); mounted || err != nil {
		return err
	}
	return state.Errorf(state.InvalidArgument, "fs_type %q is not one that this node can make (%s)", fsType, strings.Join(types, ", "))
}

// whilePending returns the error for an invalid request. The error is not final while an
// earlier request for one of the parts is pending, is being undone, or is fulfilled but not
// Confirmed: after a final error kubelet would assume that nothing is there, and never remove
// what the earlier request makes.
func (s *Server) whilePending(id string, err error, parts ...state.Part) error {
	record := s.Records.Get(id)
	if record == nil || !state.ClassOf(err).Final() {
		return err
	}
	for _, part := range parts {
		if asked := record.Latest(part); asked != nil && (asked.Withdrawn || !asked.Gone && !asked.Confirmed()) {
			return state.Errorf(state.Aborted, "%w; and an earlier request is still pending", err)
		}
	}
	return err
}

// volumeContext joins the contexts of a request, without their secrets.
func (s *Server) volumeContext(v devices.Volume) (map[string]string, error) {
	switch v.Context[state.EphemeralKey] {
	case "", "false", "true":
	default:
		return nil, state.Errorf(state.InvalidArgument, "volume_context: %s is %q, neither true nor false", state.EphemeralKey, v.Context[state.EphemeralKey])
	}
	public := maps.Clone(v.Context)
	delete(public, state.TokensKey)
	return state.JoinContext(public, v.Publish, func(key string) bool { return s.Backends.PublishIdentity(v, key) }), nil
}
