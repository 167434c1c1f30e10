package state

import "time"

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
	case !v.Size.Accepted && v.Size.CallerWaits:
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
