// The end-to-end test. A module of its own, as what it builds in build/ is, so
// that nothing of it reaches the product's go.mod.
module github.com/csi-node/csi-node/test/e2e

go 1.26.0

require golang.org/x/sys v0.50.0
