//go:build upstream

package e2e

const (
	upstream = true
	poolSize = "40G" // sparse: a test of theirs fills the node with as many volumes as it takes
)
