// Package node tests the built csi-node binary on the real kernel, by what a
// caller can see: CSI answers, mounts, loop devices, bytes, processes. It has what
// only these can show; a rule of the planner or the worker, and what one package does,
// stands in the tests of that package.
//
// Begin with TestLifeOfAMountedVolume in volume_life_test.go.
package node

import (
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
