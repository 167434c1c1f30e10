package state

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"
)

// ErrNotStaged is what AskSize returns for a volume without a stage. It is also why a
// provisional stage is refused.
var ErrNotStaged = Errorf(FailedPrecondition, "the volume is not staged on this node: NodeStageVolume comes first")

// ErrNothingThere is returned by an edit that asks for the removal of something that
// is not in the record: the request is met already.
var ErrNothingThere = Errorf(NotFound, "nothing is there")

// ErrStagedElsewhere is what AskUnstage returns of a volume that is staged at another
// path. It may be mounted at this one all the same: AskUnmount takes that away.
var ErrStagedElsewhere = Errorf(NotFound, "the volume is staged at another path")

// The edits below are all the requests that exist. Each is made inside
// store.Store.Edit, on a record that already carries the revision of the edit. It
// either refuses with a classified error or leaves the record as asked. A repeated
// request changes nothing, and so joins the one before.
//
// An intent of which the CO was never told that it holds is superseded by another
// request for the same part as soon as no caller waits for it: it becomes a tombstone,
// and the new intent its Next.

// AskStage asks for the stage s. An empty fs type is that of the present stage, if
// there is one.
//
// AlreadyExists: another stage was accepted. Aborted: a caller waits for another
// one, or it is being taken down.
func (v *Volume) AskStage(s *Stage, now time.Time) error {
	if err := v.dropProvisional(); err != nil {
		return err
	}
	have := v.Stage
	switch {
	case have == nil:
	case have.Next != nil && have.Next.meets(s):
		have.Next.Context = s.Context
		return nil
	case have.Next != nil && have.Next.Asked:
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
		return Errorf(AlreadyExists, "the volume is staged already at %s with another capability, other mount flags or another context: asked for %s, staged with %s", have.Path, s.Capability, have.Capability)
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

// Presume gives a volume without a stage a provisional one at path. If the path or the
// capability is empty, it is never adopted: its refusal then tells whether the volume
// exists.
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
	if v.Size != nil && v.Size.Asked {
		return pending(SizePart())
	}
	for _, path := range v.TargetPaths() {
		if t := v.Targets[path]; t.Asked && !t.Gone {
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

// checkFoundFlags refuses mount flags that the kernel does not show of an adopted stage.
func (s *Stage) checkFoundFlags(have *Stage) error {
	flags, err := ParseFlags(s.Capability.Flags)
	if err != nil {
		return err
	}
	adopted, err := ParseFlags(have.Capability.Flags)
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
func (s *Stage) meets(asked *Stage) bool {
	o := *asked
	if o.Capability.FSType == "" {
		o.Capability.FSType = s.Capability.FSType
	}
	return s.SameAs(&o)
}

// replaceable reports whether the stage may give way to another one: the CO was told
// neither of it nor of a target of it.
func (v *Volume) replaceable() bool {
	for _, t := range v.Targets {
		if t.Told() {
			return false
		}
	}
	return !v.Stage.Gone && !v.Stage.Told()
}

// replaceStage replaces a replaceable stage by s, and withdraws the targets with it.
// Aborted: a caller waits for one of them.
func (v *Volume) replaceStage(s *Stage, now time.Time) error {
	have := v.Stage
	begun := have.Begun || have.Accepted || have.Inline.Fresh()
	if have.Asked {
		return pending(StagePart())
	}
	for path, t := range v.Targets {
		if t.Asked && !t.Gone || t.Next != nil && t.Next.Asked {
			return pending(TargetPart(path))
		}
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

// pending is the error of a request while a caller waits for one that contradicts it.
func pending(part Part) error {
	return Errorf(Aborted, "%s: a caller waits for an earlier request that asks for something else; it gives way when nobody does", part)
}

// AskUnstage asks that nothing is staged at path. A stage elsewhere is left alone.
//
// FailedPrecondition: the volume is still published, at the targets named.
// Aborted: what was begun there is being taken back in favour of a stage elsewhere.
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
	if v.Stage != nil && v.Stage.Path != path && !v.Stage.Provisional && !v.Stage.unrecorded() {
		return ErrStagedElsewhere
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

// unrecorded reports whether the stage is the tombstone of an unstage that found no
// record. The volume may be staged at another path, so an unstage there replaces it.
func (s *Stage) unrecorded() bool {
	return s.Gone && s.Capability.Access == "" && s.Inline == nil && s.Next == nil
}

// singleTargetModes holds the access modes under which one target at a time may be
// published on a node (CSI spec v1.13, NodePublishVolume, table of second calls).
var singleTargetModes = []string{"SINGLE_NODE_SINGLE_WRITER", "SINGLE_NODE_WRITER", "SINGLE_NODE_READER_ONLY"}

// AskPublish asks for the target t, bound from stagingPath. A volume without a
// stage gets a provisional one there.
//
// FailedPrecondition: the stage is elsewhere or unlike the target, or the access
// mode allows no second target. AlreadyExists: the target was accepted with other
// arguments. Aborted: a caller waits for another publish there, or something is
// being taken down that must be gone first, or an earlier request is still pending.
func (v *Volume) AskPublish(t *Target, stagingPath string, now time.Time) error {
	have := v.Targets[t.Path]
	stage, size, targets := v.Stage, v.Size, maps.Clone(v.Targets)
	err := v.Presume(stagingPath, t.Capability, t.Context, now)
	if err == nil {
		err = v.askPublish(t, stagingPath, now)
	}
	if err != nil {
		v.Stage, v.Size, v.Targets = stage, size, targets
	}
	if ClassOf(err).Final() && have != nil && (have.Next != nil || !have.Gone && !have.Told()) {
		return Errorf(Aborted, "%w; and an earlier request for %s is still pending", err, t.Path)
	}
	return err
}

func (v *Volume) askPublish(t *Target, stagingPath string, now time.Time) error {
	s := v.Stage
	have := v.Targets[t.Path]
	if t.Capability.FSType == "" && s != nil && s.Capability.Access == t.Capability.Access {
		t.Capability.FSType = s.Capability.FSType
	}
	switch {
	case have != nil && have.Next != nil && have.Next.SameAs(t) && s.Path == stagingPath:
		have.Next.Context = t.Context
		return nil
	case have != nil && have.Next != nil && have.Next.Asked, have != nil && !have.Gone && !have.Told() && have.Asked && !have.SameAs(t):
		return pending(TargetPart(t.Path))
	case have != nil && !have.Gone && have.SameAs(t) && s.Path == stagingPath:
		have.Context = t.Context
		return nil
	case have != nil && !have.Gone && have.Told() && s.Path == stagingPath:
		return Errorf(AlreadyExists, "the volume is published already at %s with another capability, context or read-only setting", t.Path)
	case s.Gone:
		return Errorf(Aborted, "the volume is being unstaged from %s", s.Path)
	case s.Provisional && have != nil && have.Gone: // a refusal would drop the tombstone
		return Errorf(Aborted, "the volume is still being unpublished from %s", t.Path)
	case s.Path != stagingPath:
		return Errorf(FailedPrecondition, "the volume is staged at %s, not at the staging target path %s", s.Path, stagingPath)
	case s.Capability.Access == t.Capability.Access && s.Capability.FSType == "" && t.Capability.FSType != "":
		return Errorf(Aborted, "the volume is being staged at %s, and the type of its file system is not chosen yet", s.Path)
	case s.Capability.Access != t.Capability.Access, s.Capability.FSType != t.Capability.FSType:
		return Errorf(FailedPrecondition, "the volume is staged as %s, not as %s", s.Capability, t.Capability)
	case s.ReadOnly && !t.ReadOnly:
		return Errorf(FailedPrecondition, "the volume is staged read-only at %s, and publishing it for writing was asked for", s.Path)
	case have != nil && have.Gone && have.Next == nil && !have.SameAs(t):
		return Errorf(Aborted, "the volume is still being unpublished from %s", t.Path)
	}
	if have != nil {
		t.Device = have.Device
	}
	if err := v.checkPath(t.Path); err != nil {
		return err
	}
	if err := t.flagsBeyond(s); err != nil {
		return err
	}
	if err := v.allowsAnother(t); err != nil {
		return err
	}
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
	return nil
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
	mine, err := ParseFlags(t.Capability.Flags)
	if err != nil {
		return err
	}
	staged, err := ParseFlags(s.Capability.Flags)
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
		other := v.Targets[path]
		if path == t.Path || !slices.Contains(singleTargetModes, t.Capability.Mode) && !slices.Contains(singleTargetModes, other.Capability.Mode) {
			continue
		}
		if other.Gone {
			return Errorf(Aborted, "the volume is still being unpublished from %s, and access mode %s allows one target", path, t.Capability.Mode)
		}
		return Errorf(FailedPrecondition, "the volume is published at %s, and access mode %s allows one target", path, t.Capability.Mode)
	}
	return nil
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

// AskInline asks for an inline volume: its stage, and the publish that it lives for.
//
// The errors are those of AskStage and AskPublish.
func (v *Volume) AskInline(s *Stage, t *Target, now time.Time) error {
	if have := v.Stage; have != nil && have.Inline == nil && have.Path == s.Path { // an earlier version asked for it
		have.Inline = s.Inline
	}
	if err := v.AskStage(s, now); err != nil {
		return err
	}
	return v.AskPublish(t, s.Path, now)
}

// AskEnd is AskUnpublish for the publish of what may be an inline volume, staged at
// staging: such a volume ends with it. If the record does not tell whether it is one,
// the backend is asked first. An empty staging means that it is none.
func (v *Volume) AskEnd(path, staging string, now time.Time) error {
	if err := v.AskUnpublish(path, now); err != nil || staging == "" || len(v.publishedPaths()) > 0 {
		return err
	}
	switch s := v.Stage; {
	case s == nil:
		v.Stage = &Stage{Path: staging, Provisional: true, Inline: &Inline{Target: path, Made: true}}
	case s.Path == staging && s.Inline == nil: // of an earlier version
		s.Inline = &Inline{Target: path, Made: true}
	case s.Path != staging || s.Inline.Target != path:
		return nil
	case !s.Inline.Made && !s.Inline.Ended: // or it is being made
		s.Provisional, s.Inline.Made = !s.Begun && !s.Accepted, true
	}
	if !v.Stage.Inline.Ended { // a new revision, because an earlier removal of the target alone may just be settled
		v.Targets[path].Intent = Intent{Gone: true, Revision: v.Revision, Since: now}
	}
	v.Size = nil
	v.Stage.end(v.Revision, now)
	return nil
}

// end asks for the end of an inline volume.
func (s *Stage) end(revision uint64, now time.Time) {
	s.remove(revision, now)
	s.Next, s.Inline.Ended = nil, true
}

// AskSize asks for at least that many bytes, and for no more than limit unless that
// is 0. An accepted size never shrinks. One that was not accepted is superseded by any
// other once no caller waits for it, so that an expansion for which there is no room
// does not prevent a smaller one.
//
// ErrNotStaged: the volume has no stage. Aborted: it is being taken down, or a caller
// waits for another size.
func (v *Volume) AskSize(bytes, limit int64, now time.Time) error {
	before := int64(0) // the last accepted size
	switch {
	case v.Stage == nil:
		return ErrNotStaged
	case v.Stage.Gone:
		return Errorf(Aborted, "the volume is being unstaged from %s", v.Stage.Path)
	case v.Size == nil:
	case v.Size.Accepted && v.Size.Bytes >= bytes, v.Size.Bytes == bytes && v.Size.Limit == limit:
		return nil
	case !v.Size.Accepted && v.Size.Asked:
		return pending(SizePart())
	case v.Size.Accepted:
		before = v.Size.Bytes
	default:
		before = v.Size.Before
	}
	v.Size = &Size{Intent: Intent{Revision: v.Revision, Since: now}, Bytes: bytes, Limit: limit, Before: before}
	if bytes <= before {
		v.Size.Bytes, v.Size.Accepted = before, true
	}
	return nil
}

// Withdraw takes back the part's intent, after a final failure or in favour of another
// intent. It does nothing if the CO was told that the intent holds. A stage or a target
// becomes a tombstone, or is dropped if nothing was done for it; a size returns to the
// last accepted one. A provisional stage is dropped with the last part that needs it. An
// inline volume ends with its publish, unless it may hold a pod's data.
func (v *Volume) Withdraw(p Part, now time.Time) {
	intent := v.Intent(p)
	if intent == nil || intent.Told() || intent.Gone {
		return
	}
	if p.Kind == SizeKind {
		before := v.Size.Before
		v.Size = nil
		if before > 0 {
			v.Size = &Size{Intent: Intent{Accepted: true, Revision: v.Revision, Since: now}, Bytes: before, Before: before}
		}
		v.dropUnneeded()
		return
	}
	s, fresh := v.Stage, false
	if p.Kind == TargetKind && s.LivesFor(p.Path) && !s.Gone && !slices.ContainsFunc(v.publishedPaths(), func(path string) bool { return path != p.Path }) {
		if fresh = s.Inline.Fresh(); fresh {
			s.end(v.Revision, now)
			s.Withdrawn = true
		} else {
			v.Withdraw(StagePart(), now)
		}
	}
	switch {
	case intent.Begun, intent.Accepted, fresh:
	case p.Kind == StageKind:
		v.Stage = nil
		return
	default:
		delete(v.Targets, p.Path)
		v.dropUnneeded()
		return
	}
	intent.remove(v.Revision, now)
	intent.Withdrawn = true
}

// Accept notes that the part was seen to hold, and whether a caller is told so.
func (v *Volume) Accept(p Part, told bool) {
	if intent := v.Intent(p); intent != nil {
		intent.Accepted, intent.Unheard = true, !told && p.Kind != SizeKind
	}
	if v.Stage.LivesFor(p.Path) {
		v.Stage.Inline.Used = true
	}
}

// Drop removes a tombstone that was seen to hold: its Next takes its place.
func (v *Volume) Drop(p Part) {
	switch intent := v.Intent(p); {
	case intent == nil || !intent.Gone:
	case p.Kind == StageKind && v.Stage.Next != nil:
		v.setStage(v.Stage.Next)
	case p.Kind == StageKind:
		v.Stage = nil
	case p.Kind == TargetKind && v.Targets[p.Path].Next != nil:
		v.Targets[p.Path] = v.Targets[p.Path].Next
	case p.Kind == TargetKind:
		delete(v.Targets, p.Path)
		v.dropUnneeded()
	}
}

// Choose sets the fs type of a stage without one, and of its targets.
func (v *Volume) Choose(fsType string) {
	v.Stage.Capability.FSType = fsType
	for _, t := range v.Targets {
		for ; t != nil; t = t.Next {
			if t.Capability.Access == MountAccess && t.Capability.FSType == "" {
				t.Capability.FSType = fsType
			}
		}
	}
}

// remove turns the intent into a tombstone that the CO asked for.
func (i *Intent) remove(revision uint64, now time.Time) {
	if i.Gone && !i.Withdrawn {
		return
	}
	*i = Intent{Gone: true, Revision: revision, Since: now}
}

// publishedPaths returns the paths of the targets that are to be published, now or once a
// tombstone there gives way.
func (v *Volume) publishedPaths() []string {
	return slices.DeleteFunc(v.TargetPaths(), func(path string) bool {
		return v.Targets[path].Gone && v.Targets[path].Next == nil
	})
}

// TargetPaths returns the paths of all targets, tombstones too, in order.
func (v *Volume) TargetPaths() []string {
	if len(v.Targets) == 0 {
		return nil
	}
	paths := make([]string, 0, len(v.Targets))
	for path := range v.Targets {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	return paths
}
