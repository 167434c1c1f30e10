package mapper

import (
	"encoding/binary"
	"slices"
	"strings"
	"testing"

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

// There may be no device mapper at all, and so no device.
func TestNoDevice(t *testing.T) {
	machine.Kernel(t)
	if d, err := Find("csi-node-no-such-device"); d != nil || err != nil {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := FindUUID("LVM-no-such-device"); d != nil || err != nil {
		t.Errorf("%+v, %v", d, err)
	}
	if d, err := Find(strings.Repeat("x", 200)); d != nil || err != nil {
		t.Errorf("%+v, %v", d, err)
	}
	if targets, err := Targets(); err != nil {
		t.Errorf("%q, %v", targets, err)
	}
	if name, uuid := At(state.DeviceNumber{}); name != "" || uuid != "" {
		t.Errorf("%q, %q", name, uuid)
	}
}

// The list that the kernel makes of its targets is read as far as it goes.
func TestTargetNames(t *testing.T) {
	entry := func(next uint32, name string) []byte {
		e := append(binary.NativeEndian.AppendUint32(nil, next), make([]byte, 12)...)
		return append(append(e, name...), 0, 0, 0)
	}
	list := slices.Concat(entry(24, "crypt"), entry(0, "linear"), entry(0, "behind the last"))
	if got := targetNames(list); !slices.Equal(got, []string{"crypt", "linear"}) {
		t.Errorf("%q", got)
	}
	for _, broken := range [][]byte{nil, make([]byte, 16), entry(1<<31, "one")[:17], entry(4096, "x")} {
		if got := targetNames(broken); len(got) > 1 {
			t.Errorf("of %v it reads %q", broken, got)
		}
	}
}
