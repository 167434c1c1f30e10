package pool_test

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

// A device that an earlier container of the plugin attached is the volume's,
// though sysfs names its backing by a path that is no more.
func TestVolumeAtOfAnEarlierContainer(t *testing.T) {
	p, dir := newPool(t)
	before := newBackend(t, p)
	create(t, p, "vol", pool.Thin)
	d := attach(t, before, "vol", false)
	if id := before.VolumeAt(d.Number); id != "vol" {
		t.Errorf("%s stands for %q", d.Path, id)
	}

	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	require.NoError(t, os.Mkdir(elsewhere, 0o700))
	require.NoError(t, unix.Mount(dir, elsewhere, "", unix.MS_BIND, ""))
	t.Cleanup(func() {
		if err := machine.Unmount(elsewhere); err != nil {
			t.Error(err)
		}
	})
	moved, err := pool.Open(elsewhere)
	require.NoError(t, err)
	after := newBackend(t, moved)
	if id := after.VolumeAt(d.Number); id != "vol" {
		t.Errorf("after a start %s stands for %q", d.Path, id)
	}
	require.NoError(t, after.Detach(t.Context(), "vol"))
	if id := after.VolumeAt(d.Number); id != "" {
		t.Errorf("a free device stands for %q", id)
	}
	if id := after.VolumeAt(state.DeviceNumber{Major: 7, Minor: 1 << 19}); id != "" {
		t.Errorf("no device stands for %q", id)
	}
}
