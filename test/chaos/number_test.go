package chaos

import (
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// A pod has its raw block volume by the number of a device. If somebody detaches
// that while nobody has it open, no other volume takes the number: the pod would
// have the other's bytes. The volume itself has its number again, or its status
// says that the pod must be restarted.
func TestNumberOfAPublishedDeviceIsSpared(t *testing.T) {
	p := harness.Start(t, harness.Options{})
	v := newVolume(t, p, "volume", "", "thin", 16*mib, 2)
	v.up()
	must(t, v.sign())
	before := rdev(t, v.targets[0])
	for _, view := range []bool{true, false} { // the view first, which is over the other
		for _, loop := range p.Loops() {
			if (loop.Backing != v.Data()) == view {
				_, err := machine.Detach(loop.Path, loop.Backing)
				must(t, err)
			}
		}
	}
	var others []*volume
	for _, name := range []string{"one", "two", "three"} {
		other := newVolume(t, p, name, "", "thin", 16*mib, 2)
		other.up()
		for i, target := range other.targets {
			if n := rdev(t, target); n == before || n == rdev(t, v.targets[1]) {
				t.Errorf("target %d of volume %s is device %d:%d, which another pod has", i, name, unix.Major(n), unix.Minor(n))
			}
		}
		others = append(others, other)
	}
	for _, other := range others {
		must(t, other.sign())
		for _, target := range v.targets { // another process may have taken the number
			if f := other.meet(target, os.O_RDONLY); f != nil {
				t.Errorf("%s shows volume %s", target, other.ID)
				must(t, f.Close())
			}
		}
	}

	p.Retry(v.ID)
	text := v.Unsettled()
	switch f := v.meet(v.targets[0], os.O_RDONLY); {
	case text == "" && f == nil:
		t.Error("settled, and the volume is not at its target")
	case text != "" && (!strings.Contains(text, "restart the pod") || !strings.Contains(text, v.targets[0])):
		t.Errorf("the status says %s", text)
	case f != nil:
		must(t, f.Close())
	}
	for _, volume := range append(others, v) {
		volume.down()
	}
}

// rdev is the number of the device node at a path.
func rdev(t testing.TB, path string) uint64 {
	t.Helper()
	var st unix.Stat_t
	must(t, unix.Stat(path, &st))
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Fatalf("%s is no block device", path)
	}
	return st.Rdev
}
