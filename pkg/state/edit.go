package state

import (
	"slices"
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

// The edits named Ask… are all the requests that exist: edit_stage.go, edit_publish.go,
// edit_inline.go, edit_size.go. Each is made inside Edit or Propose of the store, on a
// record that already carries the revision of the edit. It either refuses with a classified
// error or leaves the record as asked. A repeated request changes nothing, and so joins the
// one before.
//
// An intent that is not Confirmed is superseded by another request for the same part as
// soon as no caller waits for it: it becomes a tombstone, and the new intent its Next.

// pending is the error of a request while a caller waits for one that contradicts it.
func pending(part Part) error {
	return Errorf(Aborted, "%s: a caller waits for an earlier request that asks for something else; it gives way when nobody does", part)
}

// Withdraw takes back the part's intent, after a final failure or in favour of another
// intent. It does nothing if the intent is Confirmed. A stage or a target
// becomes a tombstone, or is dropped if nothing was done for it; a size returns to the
// last accepted one. A provisional stage is dropped with the last part that needs it. An
// inline volume ends with its publish, unless it may hold a pod's data.
func (v *Volume) Withdraw(p Part, now time.Time) {
	intent := v.Intent(p)
	if intent == nil || intent.Confirmed() || intent.Gone {
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

// Accept notes that an observation found the part's intent fulfilled. confirmed: a caller
// waits, and will be told.
func (v *Volume) Accept(p Part, confirmed bool) {
	if intent := v.Intent(p); intent != nil {
		intent.Accepted, intent.Unconfirmed = true, !confirmed && p.Kind != SizeKind
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

// remove turns the intent into a tombstone. Withdraw marks its own as Withdrawn.
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
