package report

import (
	"errors"

	"github.com/csi-node/csi-node/pkg/state"
)

// Serves reports whether a place of which a check returned err still serves the volumes
// that it has: err is nil, state.Degraded (one more fault would lose data), or
// ResourceExhausted (it is only full).
func Serves(err error) bool {
	return err == nil || isDegraded(err) || state.ClassOf(err) == state.ResourceExhausted
}

func isDegraded(err error) bool { return errors.As(err, new(*state.Degraded)) }

// StorageHealth renders the results of the checks, place by place, for
// NodeGetStorageHealth. A place with which nothing is wrong is left out.
func StorageHealth(errs []error) (findings []Finding) {
	for _, err := range errs {
		switch {
		case err == nil:
		case isDegraded(err):
			findings = append(findings, Finding{Degraded, "PoolDegraded", err.Error()})
		case Serves(err):
			findings = append(findings, Finding{Degraded, "PoolFull", err.Error()})
		default:
			findings = append(findings, Finding{Inaccessible, "PoolUnusable", err.Error()})
		}
	}
	return findings
}
