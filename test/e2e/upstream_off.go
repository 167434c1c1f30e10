//go:build !upstream

package e2e

const (
	upstream = false // whether the storage tests of Kubernetes run, which are built and given their images only then
	poolSize = "8G"
)
