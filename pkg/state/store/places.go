package store

import (
	"slices"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// places is an index of the paths at which volumes are to be mounted, or unmounted.
// Of two mounts, one at a path within the other's, the upper one hides the other or
// keeps it busy. A check takes a step for each directory of a path, whatever the
// number of volumes.
type places struct {
	at    map[string][]occupant // by path; more than one while something is taken down there
	below map[string]int        // how many occupants there are below a directory
}

// occupant is a part of a volume at a path.
type occupant struct {
	volume string
	part   state.Part
	path   string
	gone   bool // it is being taken down
}

// occupants returns the parts of a record that have a path.
func occupants(v *state.Volume) (all []occupant) {
	for s := v.Stage; s != nil; s = s.Next {
		if s.Path != "" { // the path of some provisional stages is not known
			all = append(all, occupant{v.ID, state.StagePart(), s.Path, s.Gone})
		}
	}
	for _, t := range v.Targets {
		for ; t != nil; t = t.Next {
			all = append(all, occupant{v.ID, state.TargetPart(t.Path), t.Path, t.Gone})
		}
	}
	return all
}

// difference returns the occupants of one record that another one does not have.
func difference(all, others []occupant) (only []occupant) {
	for _, o := range all {
		if !slices.Contains(others, o) {
			only = append(only, o)
		}
	}
	return only
}

// add adds occupants, and remove takes them away again.
func (p *places) add(all []occupant) {
	for _, o := range all {
		p.at[o.path] = append(p.at[o.path], o)
		for _, dir := range above(o.path) {
			p.below[dir]++
		}
	}
}

func (p *places) remove(all []occupant) {
	for _, o := range all {
		p.at[o.path] = slices.DeleteFunc(p.at[o.path], func(other occupant) bool { return other == o })
		if len(p.at[o.path]) == 0 {
			delete(p.at, o.path)
		}
		for _, dir := range above(o.path) {
			if p.below[dir]--; p.below[dir] == 0 {
				delete(p.below, dir)
			}
		}
	}
}

// above returns the directories above a path, but for the root, the lowest first.
func above(path string) (dirs []string) {
	for end := strings.LastIndexByte(path, '/'); end > 0; end = strings.LastIndexByte(path[:end], '/') {
		dirs = append(dirs, path[:end])
	}
	return dirs
}

// check refuses the occupants that an edit adds to a record, where one asks for a part of a
// volume at, above or below the path of another part. It asks nothing of what is to be
// unmounted.
//
// FailedPrecondition: another part is to stay there. Aborted: it is to go, or the
// part was asked for elsewhere before and may yet come.
func (p *places) check(before *state.Volume, added []occupant) error {
	for _, o := range added {
		if o.gone {
			continue
		}
		if err := p.refuse(o); err != nil {
			if was := before.Latest(o.part); was != nil && !was.Gone && !was.Accepted {
				err = state.Errorf(state.Aborted, "%w; and what was asked for before is not over", err)
			}
			return err
		}
	}
	return nil
}

// near returns the occupants at a path, above and below it.
func (p *places) near(path string) []occupant {
	all := p.within(path)
	for _, dir := range above(path) {
		all = append(all, p.at[dir]...)
	}
	return all
}

// within returns the occupants at a path and below it.
func (p *places) within(path string) []occupant {
	all, dir := slices.Clone(p.at[path]), strings.TrimSuffix(path, "/")
	if p.below[dir] > 0 || dir == "" {
		for other, occupants := range p.at {
			if state.Within(other, dir) {
				all = append(all, occupants...)
			}
		}
	}
	return all
}

// refuse names the occupant that is in the way of another, one that is to stay if
// there is one.
func (p *places) refuse(asked occupant) error {
	var found *occupant
	for _, o := range p.near(asked.path) {
		itself := o.volume == asked.volume && o.part == asked.part
		if !itself && (found == nil || found.gone && !o.gone) {
			found = &o
		}
	}
	if found == nil {
		return nil
	}
	where := "the same path"
	switch {
	case state.Within(asked.path, found.path):
		where = found.path + ", which lies above it"
	case state.Within(found.path, asked.path):
		where = found.path + ", which lies below it"
	}
	done, end := "staged", "NodeUnstageVolume"
	if found.part.Kind == state.TargetKind {
		done, end = "published", "NodeUnpublishVolume"
	}
	if found.gone {
		return state.Errorf(state.Aborted, "the path %s: volume %s is still being un%s from %s", asked.path, found.volume, done, where)
	}
	return state.Errorf(state.FailedPrecondition, "the path %s: volume %s is %s at %s, and two must lie apart: choose another path, or end that by %s", asked.path, found.volume, done, where, end)
}
