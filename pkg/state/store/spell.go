package store

import "github.com/csi-node/csi-node/pkg/state"

// Spell gives every path of every record the spelling that spell returns for it,
// in memory: the disk follows with the next edit of a record. It serves records
// of versions that kept paths as they were asked. Of two parts that turn out to
// have the same path the one counts that was asked for last. It must be called
// before the first Edit.
func (s *Store) Spell(spell func(path string) string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	records := map[string]*state.Volume{}
	for id, v := range s.volumes {
		records[id] = v.Clone() // what Get and List returned stays as it is
		spellRecord(records[id], spell)
	}
	s.take(records)
}

func spellRecord(v *state.Volume, spell func(path string) string) {
	for s := v.Stage; s != nil; s = s.Next {
		s.Path = spell(s.Path)
		if s.Inline != nil {
			s.Inline.Target = spell(s.Inline.Target)
		}
	}
	targets := make(map[string]*state.Target, len(v.Targets))
	for _, t := range v.Targets {
		for ask := t; ask != nil; ask = ask.Next {
			ask.Path = spell(ask.Path)
		}
		if other := targets[t.Path]; other == nil || other.Revision < t.Revision {
			targets[t.Path] = t
		}
	}
	v.Targets = targets
}
