package mounts

import (
	"testing"

	"github.com/csi-node/csi-node/test/machine"
)

func TestMain(m *testing.M) { machine.Apart(m) }
