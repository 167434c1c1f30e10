package loop

import (
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
)

// A view that is refused is not there for a moment either.
func TestRefusedViewLeavesNoDevice(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	meant := d
	meant.Number.Minor += 1000
	wantError(t, b.AttachView(t.Context(), meant), state.Unavailable, d.Path)
	names, err := bound()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if backingOf(name) == d.Path {
			t.Errorf("/dev/%s was attached over %s", name, d.Path)
		}
	}
}

// Who may configure a device and not make it writable leaves none behind.
// LOOP_CONFIGURE asks for no capability, BLKROSET after it does.
func TestFailedAttachLeavesNoDevice(t *testing.T) {
	const name = "CSI_NODE_TEST_INCAPABLE"
	if os.Getenv(name) == "" {
		cmd := exec.Command("setpriv", "--bounding-set", "-sys_admin", os.Args[0], "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), name+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("without CAP_SYS_ADMIN: %v:\n%s", err, out)
		}
		return
	}
	for _, how := range []pool.Provisioning{pool.Thin, pool.Thick} {
		b, data := setup(t, how)
		wantError(t, b.Attach(t.Context(), "vol", false), state.Unavailable, "CAP_SYS_ADMIN")
		mustHaveNoDevice(t, data)
	}
}

// mustHaveNoDevice waits for those that udev looks at just now.
func mustHaveNoDevice(t *testing.T, data string) {
	t.Helper()
	var shown []string
	for range 400 {
		names, err := bound()
		if err != nil {
			t.Fatal(err)
		}
		shown = slices.DeleteFunc(names, func(name string) bool { return backingOf(name) != data })
		if len(shown) == 0 {
			return
		}
		time.Sleep(goneInterval)
	}
	t.Errorf("%s is attached as %v", data, shown)
}
