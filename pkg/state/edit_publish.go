package state

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"time"
)

// singleTargetModes holds the access modes under which one target at a time may be
// published on a node (CSI spec v1.13, NodePublishVolume, table of second calls).
var singleTargetModes = []string{"SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_WRITER", "SINGLE_NODE_READER_ONLY"}

// ErrEarlierPending is wrapped by the refusal of a publish while an earlier one at the same
// target is neither fulfilled nor taken back. It gives way by GiveUp.
var ErrEarlierPending = errors.New("an earlier request is still pending")

// AskPublish asks for the target t, bound from stagingPath. A volume without a
// stage gets a provisional one there.
//
// FailedPrecondition: the stage is elsewhere or unlike the target, or the access
// mode allows no second target. AlreadyExists: the target was accepted with other
// arguments. Aborted: a caller waits for another publish there, or something is
// being taken down that must be gone first, or ErrEarlierPending.
func (v *Volume) AskPublish(t *Target, stagingPath string, now time.Time) error {
	have := v.Targets[t.Path]
	stage, size, targets := v.Stage, v.Size, maps.Clone(v.Targets)
	err := v.Presume(stagingPath, t.Capability, t.Context, now)
	if err == nil {
		if have != nil && have.Begun && !have.Gone && !have.Confirmed() {
			v.Targets[t.Path] = have // not a tombstone yet: t takes its place
		}
		err = v.askPublish(t, stagingPath, now)
	}
	if err != nil {
		v.Stage, v.Size, v.Targets = stage, size, targets
	}
	if ClassOf(err).Final() && have != nil && (have.Next != nil || have.Withdrawn || !have.Gone && !have.Confirmed()) {
		return Errorf(Aborted, "%w; and %w for %s", err, ErrEarlierPending, t.Path)
	}
	return err
}

// GiveUp takes back what was last asked for a target, if the CO was never told that it
// holds and no caller waits for it: the CO asks for something else there by now, which
// cannot be had.
func (v *Volume) GiveUp(target Part, now time.Time) {
	have := v.Targets[target.Path]
	switch {
	case have == nil || v.Latest(target).CallerWaits:
	case have.Next != nil:
		have.Next = nil
	default:
		v.Withdraw(target, now)
	}
}

func (v *Volume) askPublish(t *Target, stagingPath string, now time.Time) error {
	s, have := v.Stage, v.Targets[t.Path]
	if t.Capability.FSType == "" && s.Capability.Access == t.Capability.Access {
		t.Capability.FSType = s.Capability.FSType
	}
	if have != nil {
		if same, err := have.askedAgain(t, s.Path == stagingPath); same || err != nil {
			return err
		}
	}
	err := s.admits(t, stagingPath, have)
	if err == nil {
		err = v.checkPath(t.Path)
	}
	if err == nil {
		err = t.flagsBeyond(s)
	}
	if err == nil {
		err = v.allowsAnother(t)
	}
	if err != nil {
		return err
	}
	if have != nil {
		t.Device, t.From = have.Device, have.From
	}
	v.setTarget(t, now)
	return nil
}

// askedAgain reports whether a publish asks for the target that was asked for at its path before,
// which then takes over its context. here tells whether it names the staging path of the volume.
// It refuses what contradicts a publish that was accepted, or for which a caller waits.
func (t *Target) askedAgain(asked *Target, here bool) (same bool, err error) {
	switch next := t.Next; {
	case next != nil && next.SameAs(asked) && here:
		next.Context = asked.Context
		return true, nil
	case next != nil && next.CallerWaits, !t.Gone && !t.Confirmed() && t.CallerWaits && !t.SameAs(asked):
		return false, pending(TargetPart(t.Path))
	case t.Gone || !here:
		return false, nil
	case t.SameAs(asked):
		t.Context = asked.Context
		return true, nil
	case t.Confirmed():
		return false, Errorf(AlreadyExists, "the volume is published already at %s with another capability, context or read-only setting", t.Path)
	}
	return false, nil
}

// admits refuses a target that does not fit the stage, or what is still being taken down; have
// is what is at its path, or nil.
func (s *Stage) admits(t *Target, stagingPath string, have *Target) error {
	switch leaving := have != nil && have.Gone; {
	case s.Gone:
		return Errorf(Aborted, "the volume is being unstaged from %s", s.Path)
	case s.Provisional && leaving: // a refusal would drop the tombstone
		return Errorf(Aborted, "the volume is still being unpublished from %s", t.Path)
	case s.Path != stagingPath:
		return Errorf(FailedPrecondition, "the volume is staged at %s, not at the staging target path %s", s.Path, stagingPath)
	case s.Capability.Access == t.Capability.Access && s.Capability.FSType == "" && t.Capability.FSType != "":
		return Errorf(Aborted, "the volume is being staged at %s, and the type of its file system is not chosen yet", s.Path)
	case s.Capability.Access != t.Capability.Access, s.Capability.FSType != t.Capability.FSType:
		return Errorf(FailedPrecondition, "the volume is staged as %s, not as %s", s.Capability, t.Capability)
	case s.ReadOnly && !t.ReadOnly:
		return Errorf(FailedPrecondition, "the volume is staged read-only at %s, and publishing it for writing was asked for", s.Path)
	case leaving && have.Next == nil && !have.SameAs(t):
		return Errorf(Aborted, "the volume is still being unpublished from %s", t.Path)
	}
	return nil
}

// setTarget asks for a target, in the place of the one at its path.
func (v *Volume) setTarget(t *Target, now time.Time) {
	have := v.Targets[t.Path]
	if v.Targets == nil {
		v.Targets = map[string]*Target{}
	}
	// If this target is refused, what is still being unpublished must be taken down.
	t.Intent = Intent{Revision: v.Revision, Since: now, Begun: have != nil && have.Gone && have.SameAs(t)}
	switch {
	case have == nil, have.SameAs(t), !have.Gone && !have.Begun && !have.Accepted:
		v.Targets[t.Path] = t
	default: // what was begun is undone first
		if !have.Gone {
			have.Intent = Intent{Gone: true, Withdrawn: true, Revision: v.Revision, Since: now}
		}
		have.Next = t
	}
}

// checkPath refuses a target path at, above or below another path of the volume.
// Aborted: that one is being taken down.
func (v *Volume) checkPath(path string) error {
	if place := v.Stage.Path; place == path || Within(path, place) || Within(place, path) {
		return Errorf(InvalidArgument, "the target path %s and the staging path %s must lie apart", path, place)
	}
	for _, place := range v.TargetPaths() {
		switch {
		case !Within(path, place) && !Within(place, path):
		case v.Targets[place].Gone:
			return Errorf(Aborted, "the volume is still being unpublished from %s", place)
		default:
			return Errorf(InvalidArgument, "the target path %s and %s, where the volume is published, must lie apart", path, place)
		}
	}
	return nil
}

// Within reports whether a path lies below a directory.
func Within(path, dir string) bool { return strings.HasPrefix(path, dir+"/") }

// flagsBeyond refuses superblock flags that the stage was not mounted with: a bind
// cannot add them.
func (t *Target) flagsBeyond(s *Stage) error {
	mine, staged, err := parseBoth(t.Capability.Flags, s.Capability.Flags)
	if err != nil {
		return err
	}
	if flag := mine.Beyond(staged); flag != "" {
		return Errorf(InvalidArgument, "mount flag %q: the volume was staged without it or with another value, and a publish cannot change it: stage the volume with it", flag)
	}
	return nil
}

// allowsAnother applies the access modes to a target beside those that are there.
func (v *Volume) allowsAnother(t *Target) error {
	for _, path := range v.TargetPaths() {
		mode := v.singleMode(t, path)
		switch {
		case path == t.Path || mode == "":
		case v.Targets[path].Gone:
			return Errorf(Aborted, "the volume is still being unpublished from %s, and access mode %s allows one target", path, mode)
		default:
			return Errorf(FailedPrecondition, "the volume is published at %s, and access mode %s allows one target", path, mode)
		}
	}
	return nil
}

// singleMode returns the mode, of a target or of the one at path, that allows one target;
// empty: neither is such a mode.
func (v *Volume) singleMode(t *Target, path string) string {
	for _, mode := range []string{t.Capability.Mode, v.Targets[path].Capability.Mode} {
		if slices.Contains(singleTargetModes, mode) {
			return mode
		}
	}
	return ""
}

// AskUnpublish asks that the volume is not published at path. It leaves alone the
// stage, and paths inside the mounted volume, which are a pod's.
func (v *Volume) AskUnpublish(path string, now time.Time) error {
	t := v.Targets[path]
	if t == nil {
		if v.Stage != nil && path == v.Stage.Path || v.isInsideVolume(path) {
			return ErrNothingThere
		}
		if v.Targets == nil {
			v.Targets = map[string]*Target{}
		}
		t = &Target{Path: path}
		v.Targets[path] = t
	}
	t.Next = nil
	t.remove(v.Revision, now)
	return nil
}
