package report

import (
	"cmp"
	"context"

	"github.com/csi-node/csi-node/pkg/state"
)

// Checker is a place that volumes are kept in. Check returns why it cannot be used,
// and ResourceExhausted if it is only full.
type Checker interface {
	Check(ctx context.Context) error
}

// Storage is the report of all places that volumes are kept in.
type Storage struct {
	Unusable error // why the first of them that cannot be used cannot be; nil: all can
	Full     error // that the first of them that has no room has none; nil: all have
}

// CheckStorage reports on places. It blocks for as long as one of them does, and
// ends with the first that cannot be used.
func CheckStorage[C Checker](ctx context.Context, places []C) (s Storage) {
	for _, place := range places {
		if err := place.Check(ctx); state.ClassOf(err) == state.ResourceExhausted {
			s.Full = cmp.Or(s.Full, err)
		} else if err != nil {
			s.Unusable = err
			return s
		}
	}
	return s
}

// Health renders the report for NodeGetStorageHealth: nothing if nothing is wrong.
// What is full still serves the volumes that it has.
func (s Storage) Health() []Finding {
	switch {
	case s.Unusable != nil:
		return []Finding{{Inaccessible, "PoolUnusable", s.Unusable.Error()}}
	case s.Full != nil:
		return []Finding{{Degraded, "PoolFull", s.Full.Error()}}
	}
	return nil
}
