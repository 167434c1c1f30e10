package report

import (
	"errors"

	"github.com/csi-node/csi-node/pkg/state"
)

// Serves reports whether a place that volumes are kept in serves those that it has, of
// which a check says err: it is well, or state.Degraded (one more fault would lose data),
// or only full (ResourceExhausted).
func Serves(err error) bool {
	return err == nil || isDegraded(err) || state.ClassOf(err) == state.ResourceExhausted
}

func isDegraded(err error) bool { return errors.As(err, new(*state.Degraded)) }

// StorageHealth renders what checks say of places, one after the other, for
// NodeGetStorageHealth: nothing of a place with which nothing is wrong.
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
