package state

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Presume gives a volume without a stage a provisional one at path. If the path or the
// capability is empty, that stage is never adopted, and is only there so that the worker
// finds out whether the volume exists.
//
// Aborted: a caller waits for another one.
func (v *Volume) Presume(path string, c Capability, context map[string]string, now time.Time) error {
	if s := v.Stage; s != nil && (!s.Provisional || s.presumes(path, c)) {
		return nil
	}
	if err := v.dropProvisional(); err != nil {
		return err
	}
	c.Flags = slices.Clone(c.Flags)
	v.Stage = &Stage{
		Intent: Intent{Revision: v.Revision, Since: now}, Path: path, Capability: c, Context: withoutPod(context),
		Adopted: true, Provisional: true,
	}
	return nil
}

// presumes reports whether a provisional stage also serves this request.
func (s *Stage) presumes(path string, c Capability) bool {
	if path == "" || c.Access == "" {
		return true
	}
	return s.Path == path && s.Capability.Access == c.Access && (c.FSType == "" || s.Capability.FSType == c.FSType) && sameFlags(s.Capability.Flags, c.Flags)
}

// dropProvisional drops a provisional stage, with what needs it: nothing was done
// for that yet. Aborted: a caller waits for it.
func (v *Volume) dropProvisional() error {
	switch {
	case v.Stage == nil || !v.Stage.Provisional:
		return nil
	case v.Stage.Gone:
		v.Stage = nil
		return nil
	}
	if v.Size != nil && v.Size.CallerWaits {
		return pending(SizePart())
	}
	for _, path := range v.TargetPaths() {
		if t := v.Targets[path]; t.CallerWaits && !t.Gone {
			return pending(TargetPart(path))
		}
	}
	v.Size = nil
	maps.DeleteFunc(v.Targets, func(_ string, t *Target) bool { return !t.Gone })
	v.dropUnneeded()
	return nil
}

// dropUnneeded drops a provisional stage that neither a target nor a size needs.
func (v *Volume) dropUnneeded() {
	if v.Stage != nil && v.Stage.Provisional && !v.Stage.Gone && v.Size == nil && len(v.publishedPaths()) == 0 {
		v.Stage = nil
	}
}

// Adopt accepts a provisional stage with what was found mounted: its type of file
// system and the options of its superblock, if it has one, and whether it is
// read-only. An empty backend is that of the record.
func (v *Volume) Adopt(fsType, options string, readOnly bool, backend string) {
	s := v.Stage
	s.Provisional, s.Accepted, s.Found, s.ReadOnly = false, true, options, readOnly
	v.Backend = cmp.Or(v.Backend, backend)
	if s.Capability.Access == MountAccess {
		v.Choose(fsType)
	}
}
