package report

import (
	"errors"
	"strings"

	"github.com/csi-node/csi-node/pkg/state"
)

// Serves reports whether a place of which a check returned err still serves the volumes
// that it has: err is nil, state.Degraded (one more fault would lose data), or
// ResourceExhausted (it is only full).
func Serves(err error) bool {
	return err == nil || isDegraded(err) || state.ClassOf(err) == state.ResourceExhausted
}

func isDegraded(err error) bool { return errors.As(err, new(*state.Degraded)) }

// The reasons for which something is wrong with a place, one word for programs.
const (
	PoolDegraded = "PoolDegraded" // it serves, and one more fault would lose data
	PoolFull     = "PoolFull"     // it serves the volumes that it has
	PoolUnusable = "PoolUnusable"
)

// StorageProblem is what is wrong with a place: a Finding for who reads the report of a node.
type StorageProblem struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

// StorageProblems returns findings of StorageHealth for the report of a node.
func StorageProblems(findings []Finding) (all []StorageProblem) {
	for _, f := range findings {
		all = append(all, StorageProblem{f.Reason, f.Message})
	}
	return all
}

// tell puts the problem in one line.
func (p StorageProblem) tell() string {
	return p.Reason + ": " + strings.ReplaceAll(p.Message, "\n", "; ")
}

// StorageHealth renders the results of the checks, place by place, for
// NodeGetStorageHealth. A place with which nothing is wrong is left out.
func StorageHealth(errs []error) (findings []Finding) {
	for _, err := range errs {
		switch {
		case err == nil:
		case isDegraded(err):
			findings = append(findings, Finding{Degraded, PoolDegraded, err.Error()})
		case Serves(err):
			findings = append(findings, Finding{Degraded, PoolFull, err.Error()})
		default:
			findings = append(findings, Finding{Inaccessible, PoolUnusable, err.Error()})
		}
	}
	return findings
}
