package devicestest_test

import (
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices"
	"github.com/csi-node/csi-node/pkg/devices/devicestest"
	"github.com/csi-node/csi-node/test/machine"
)

func TestOffset(t *testing.T) {
	machine.Kernel(t)
	devicestest.Layer(t, func(*testing.T) devicestest.LayerHarness {
		context := devicestest.OffsetVolume()
		context["locked"] = "true"
		return devicestest.LayerHarness{
			Layer:        devicestest.Offset{Owner: strconv.FormatUint(rand.Uint64(), 36)},
			Volume:       devices.Volume{ID: "v", Context: context, Secrets: devices.NewSecrets(map[string]string{"key": "secret"})},
			WrongSecrets: map[string]string{"key": "wrong"},
		}
	})
}
