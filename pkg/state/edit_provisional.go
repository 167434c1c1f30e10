package state

import (
	"cmp"
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
	if err := v.dropProvisional(now); err != nil {
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

// dropProvisional drops a provisional stage, with what needs it. At a target may be what an earlier
// one there, or one of another stage, has left: such a target becomes a tombstone. Targets that are
// changed are replaced, as AskPublish restores the record. Aborted: a caller waits for what needs it.
func (v *Volume) dropProvisional(now time.Time) error {
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
	if err := v.publishAwaited(); err != nil {
		return err
	}
	v.Size = nil
	for path, t := range v.Targets {
		if !t.Gone && (!t.Begun || t.Confirmed()) {
			delete(v.Targets, path)
			continue
		}
		gone := *t
		gone.Next, gone.CallerWaits = nil, false
		if !t.Gone {
			gone.Intent = Intent{Gone: true, Withdrawn: true, Revision: v.Revision, Since: now}
		}
		v.Targets[path] = &gone
	}
	v.dropUnneeded()
	return nil
}

// publishAwaited is Aborted if a caller waits for a publish.
func (v *Volume) publishAwaited() error {
	for _, path := range v.TargetPaths() {
		if t := v.Targets[path]; t.CallerWaits && !t.Gone || t.Next != nil && t.Next.CallerWaits {
			return pending(TargetPart(path))
		}
	}
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
