package pool_test

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/require"
)

// A view that is refused is not there for a moment either.
func TestRefusedViewLeavesNoDevice(t *testing.T) {
	b, _ := setup(t, pool.Thin)
	d := attach(t, b, "vol", false)
	meant := d
	meant.Number.Minor += 1000
	wantError(t, b.AttachView(t.Context(), meant), state.Unavailable, d.Path)
	for path, backing := range bound(t) {
		if backing == d.Path {
			t.Errorf("%s was attached over %s", path, d.Path)
		}
	}
}

// Who may configure a device and not make it writable leaves none behind.
// LOOP_CONFIGURE asks for no capability, BLKROSET after it does.
func TestFailedAttachLeavesNoDevice(t *testing.T) {
	for _, how := range []pool.Provisioning{pool.Thin, pool.Thick} {
		b, data := setup(t, how)
		withoutAdmin(t, func() {
			wantError(t, b.Attach(t.Context(), "vol", false), state.Unavailable, "CAP_SYS_ADMIN")
		})
		mustHaveNoDevice(t, data)
	}
}

// withoutAdmin runs f on a thread that lacks CAP_SYS_ADMIN meanwhile.
func withoutAdmin(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	header, before := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	require.NoError(t, unix.Capget(&header, &before[0]))
	less := before
	less[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	require.NoError(t, unix.Capset(&header, &less[0]))
	defer func() {
		if err := unix.Capset(&header, &before[0]); err != nil {
			t.Error(err)
		}
	}()
	f()
}

// mustHaveNoDevice waits for those that udev looks at just now.
func mustHaveNoDevice(t *testing.T, data string) {
	t.Helper()
	var shown []string
	for range 400 {
		if shown = over(t, data); len(shown) == 0 {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Errorf("%s is attached as %v", data, shown)
}
