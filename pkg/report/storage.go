package report

import (
	"cmp"
	"context"
	"errors"

	"github.com/csi-node/csi-node/pkg/state"
)

// Checker is a place that volumes are kept in. Check returns why it cannot be used,
// state.Degraded if one more fault would lose data, and ResourceExhausted if it is only
// full.
type Checker interface {
	Check(ctx context.Context) error
}

// Storage is the report of all places that volumes are kept in.
type Storage struct {
	Unusable error // why the first of them that cannot be used cannot be; nil: all can
	Degraded error // why the first of them that is degraded is; nil: none is
	Full     error // that the first of them that has no room has none; nil: all have
}

// CheckStorage reports on places. It blocks for as long as one of them does, and
// ends with the first that cannot be used.
func CheckStorage[C Checker](ctx context.Context, places []C) (s Storage) {
	for _, place := range places {
		switch err := place.Check(ctx); {
		case err == nil:
		case errors.As(err, new(*state.Degraded)):
			s.Degraded = cmp.Or(s.Degraded, err)
		case state.ClassOf(err) == state.ResourceExhausted:
			s.Full = cmp.Or(s.Full, err)
		default:
			s.Unusable = err
			return s
		}
	}
	return s
}

// Health renders the report for NodeGetStorageHealth: nothing if nothing is wrong.
// What is degraded or full still serves the volumes that it has.
func (s Storage) Health() (findings []Finding) {
	if s.Unusable != nil {
		return []Finding{{Inaccessible, "PoolUnusable", s.Unusable.Error()}}
	}
	if s.Degraded != nil {
		findings = append(findings, Finding{Degraded, "PoolDegraded", s.Degraded.Error()})
	}
	if s.Full != nil {
		findings = append(findings, Finding{Degraded, "PoolFull", s.Full.Error()})
	}
	return findings
}
