package state

import "time"

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
// staging: such a volume ends with it, also if its record has another path from when the
// driver had another name. If the record does not tell whether it is one, the backend is
// asked first. An empty staging means that it is none.
func (v *Volume) AskEnd(path, staging string, now time.Time) error {
	if err := v.AskUnpublish(path, now); err != nil || staging == "" || len(v.publishedPaths()) > 0 {
		return err
	}
	switch s := v.Stage; {
	case s == nil:
		v.Stage = &Stage{Path: staging, Provisional: true, Inline: &Inline{Target: path, Made: true}}
	case s.Inline == nil && s.Path == staging: // of an earlier version
		s.Inline = &Inline{Target: path, Made: true}
	case s.Inline == nil || s.Inline.Target != path:
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
