package mapper

import (
	"strings"
	"testing"
	"unsafe"

	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
)

func TestLayerName(t *testing.T) {
	name := LayerName([20]byte{0xab})
	if name != "csi-ab"+strings.Repeat("0", 38) || !IsLayer(name) {
		t.Errorf("%s is a layer's: %t", name, IsLayer(name))
	}
	for _, other := range []string{"", "csi-", "csi-node", name + "00", name[:42], "x" + name, "csi-" + strings.Repeat("z", 40)} {
		if IsLayer(other) {
			t.Errorf("%q is taken for a layer's", other)
		}
	}
}

// The kernel tells requests apart by their size, too.
func TestRequestIsAsLargeAsTheKernels(t *testing.T) {
	if size := unsafe.Sizeof(request{}); size != 312 {
		t.Errorf("a request has %d bytes", size)
	}
}

// There may be no device mapper at all, and so no device.
func TestNoDevice(t *testing.T) {
	machine.Kernel(t)
	if d, err := Find("csi-node-no-such-device"); d != nil || err != nil {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := FindUUID("LVM-no-such-device"); d != nil || err != nil {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := Find(strings.Repeat("x", 200)); d != nil {
		t.Errorf("%+v, %v", d, err)
	}
	if name, uuid := At(state.DeviceNumber{}); name != "" || uuid != "" {
		t.Errorf("%q, %q", name, uuid)
	}
}
