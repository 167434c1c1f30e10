package state

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// AskStage asks for the stage s. An empty fs type is that of the present stage, if
// there is one.
//
// AlreadyExists: another stage was accepted. Aborted: a caller waits for another
// one, or it is being taken down.
func (v *Volume) AskStage(s *Stage, now time.Time) error {
	if err := v.dropProvisional(now); err != nil {
		return err
	}
	have := v.Stage
	switch {
	case have == nil:
	case have.Next != nil && have.Next.meets(s):
		have.Next.Context = s.Context
		return nil
	case have.Next != nil && have.Next.CallerWaits:
		return pending(StagePart())
	case have.Next != nil && !have.meets(s):
		s.Intent = Intent{Revision: v.Revision, Since: now}
		have.Next = s
		return nil
	case !have.Gone && have.meets(s):
		have.Context = s.Context
		return nil
	case !have.Gone && have.Adopted && have.Path == s.Path && have.ReadOnly == s.ReadOnly &&
		have.Capability.Access == s.Capability.Access && (s.Capability.FSType == "" || have.Capability.FSType == s.Capability.FSType):
		s.Capability.FSType = have.Capability.FSType
		if err := s.checkFoundFlags(have); err != nil {
			return err
		}
		s.Intent, s.UUID, s.Identity, s.Backend = have.Intent, have.UUID, have.Identity, cmp.Or(v.Backend, s.Backend)
		v.setStage(s)
		return nil
	case v.replaceable():
		return v.replaceStage(s, now)
	case !have.Gone && have.Path != s.Path:
		return Errorf(AlreadyExists, "the volume is staged already at %s", have.Path)
	case !have.Gone:
		return Errorf(AlreadyExists, "the volume is staged already at %s with %s", have.Path, have.difference(s))
	case !have.meets(s):
		return Errorf(Aborted, "the volume is still being unstaged from %s", have.Path)
	}
	// If this stage is refused, what is still being unstaged must be taken down.
	s.Intent = Intent{Revision: v.Revision, Since: now, Begun: have != nil}
	v.setStage(s)
	return nil
}

// setStage makes s the stage of the volume, and moves the backend's name from s to the record.
func (v *Volume) setStage(s *Stage) {
	v.Stage, v.Backend, s.Backend = s, cmp.Or(s.Backend, v.Backend), ""
}

// checkFoundFlags refuses mount flags that the kernel does not show of an adopted stage.
func (s *Stage) checkFoundFlags(have *Stage) error {
	flags, adopted, err := parseBoth(s.Capability.Flags, have.Capability.Flags)
	if err != nil {
		return err
	}
	if maps.EqualFunc(flags.effective(), adopted.effective(), slices.Equal[[]string]) {
		return nil // these were checked when it was adopted
	}
	if option := flags.Shown(s.Capability.FSType, have.Found); option != "" {
		return Errorf(AlreadyExists, "the volume was found staged at %s, and its file system is not seen to be mounted as asked: the mount flag %q makes the difference. Unpublish and unstage the volume, then stage it anew; or ask for the options that it has", have.Path, option)
	}
	return nil
}

// meets reports whether the stage is as asked; an empty fs type asks for any.
func (s *Stage) meets(asked *Stage) bool { return s.SameAs(s.filled(asked)) }

// filled returns what is asked, with the stage's fs type if it leaves that open.
func (s *Stage) filled(asked *Stage) *Stage {
	o := *asked
	o.Capability.FSType = cmp.Or(o.Capability.FSType, s.Capability.FSType)
	return &o
}

// difference says in what the stage, at the same path, does not meet what is asked. Values of
// flags and contexts stay out of it: they may be secret.
func (s *Stage) difference(asked *Stage) string {
	o := s.filled(asked)
	switch {
	case s.Capability.String() != o.Capability.String():
		return fmt.Sprintf("another capability: asked for %s, staged with %s", o.Capability, s.Capability)
	case !s.Capability.Equal(o.Capability):
		return "other mount flags"
	case s.ReadOnly != o.ReadOnly:
		return "another read-only setting"
	}
	return "another volume_context or publish_context"
}

// replaceable reports whether the stage may give way to another one: neither it nor any
// of its targets is Confirmed.
func (v *Volume) replaceable() bool {
	for _, t := range v.Targets {
		if t.Confirmed() {
			return false
		}
	}
	return !v.Stage.Gone && !v.Stage.Confirmed()
}

// replaceStage replaces a replaceable stage by s, and withdraws the targets with it.
// Aborted: a caller waits for one of them.
func (v *Volume) replaceStage(s *Stage, now time.Time) error {
	have := v.Stage
	begun := have.Begun || have.Accepted || have.Inline.Fresh()
	if have.CallerWaits {
		return pending(StagePart())
	}
	if err := v.publishAwaited(); err != nil {
		return err
	}
	for path, t := range v.Targets {
		t.Next = nil
		v.Withdraw(TargetPart(path), now)
	}
	s.Intent = Intent{Revision: v.Revision, Since: now}
	if !begun { // nothing is to be undone
		v.setStage(s)
		return nil
	}
	have.Intent = Intent{Gone: true, Withdrawn: true, Revision: v.Revision, Since: now}
	have.Next = s
	return nil
}

// AskUnstage asks that nothing is staged at path. A stage elsewhere is left alone.
//
// FailedPrecondition: the volume is still published, at the targets named.
// Aborted: what was begun there is being taken back in favour of a stage elsewhere; or a caller
// waits for the end of one elsewhere that no record tells of.
// ErrStagedElsewhere: AskUnmount sees to what may be at path.
func (v *Volume) AskUnstage(path string, now time.Time) error {
	if s := v.Stage; s != nil && s.Next != nil {
		switch {
		case s.Next.Path != path && s.Path == path:
			return Errorf(Aborted, "the volume is still being unstaged from %s", path)
		case s.Next.Path == path && s.Path != path:
			s.Next = nil // the caller waits until the first stage is taken down
			return nil
		case s.Path == path:
			s.Next = nil
		}
	}
	if s := v.Stage; s != nil && s.Path != path && !s.Provisional {
		switch {
		case !s.Unrecorded():
			return ErrStagedElsewhere
		case s.CallerWaits: // who would be told what this path is like
			return Errorf(Aborted, "the volume is still being unstaged from %s, of which there was no record: ask again", s.Path)
		}
	}
	if published := v.publishedPaths(); len(published) > 0 {
		return Errorf(FailedPrecondition, "the volume is still published at %s: NodeUnpublishVolume comes first", strings.Join(published, ", "))
	}
	if v.Stage == nil || v.Stage.Provisional || v.Stage.Path != path {
		v.Stage = &Stage{Path: path}
	}
	v.Stage.remove(v.Revision, now)
	v.Size = nil
	return nil
}

// AskUnmount asks that a volume which is staged elsewhere is not mounted at path: it may
// have been staged there before, and that record was lost. The directory stays.
// TargetPart(path) is the part to wait for.
//
// Aborted: it is not staged elsewhere any more.
func (v *Volume) AskUnmount(path string, now time.Time) error {
	switch t := v.Targets[path]; {
	case v.Stage == nil || v.Stage.Path == path:
		return Errorf(Aborted, "the stage of the volume has changed since it was asked for: ask again")
	case t != nil && (!t.Gone || t.Next != nil): // a publish, and no stage
		return ErrNothingThere
	case t != nil:
		return nil
	case v.isInsideVolume(path):
		return ErrNothingThere
	}
	if v.Targets == nil {
		v.Targets = map[string]*Target{}
	}
	v.Targets[path] = &Target{Path: path, Intent: Intent{Gone: true, Withdrawn: true, Revision: v.Revision, Since: now}}
	return nil
}

// isInsideVolume reports whether a path is below one of the volume's own paths: what is
// mounted there is a pod's.
func (v *Volume) isInsideVolume(path string) bool {
	for other := range v.Targets {
		if Within(path, other) {
			return true
		}
	}
	return v.Stage != nil && v.Stage.Path != "" && Within(path, v.Stage.Path)
}

// Unrecorded reports whether the stage is the tombstone of an unstage that found no
// record. The volume may be staged at another path, so an unstage there replaces it, once no
// caller waits for it.
func (s *Stage) Unrecorded() bool {
	return s.Gone && s.Capability.Access == "" && s.Inline == nil && s.Next == nil
}
