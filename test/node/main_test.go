// Package node tests the built csi-node binary on the real kernel, by what a
// caller can see: CSI answers, mounts, loop devices, bytes, processes.
package node

import (
	"testing"

	"github.com/csi-node/csi-node/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }
