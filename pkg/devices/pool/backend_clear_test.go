package pool_test

import (
	"os"
	"testing"

	"github.com/csi-node/csi-node/pkg/devices/pool"
	"github.com/csi-node/csi-node/pkg/state"
	"github.com/csi-node/csi-node/test/machine"
	"github.com/csi-node/csi-node/test/require"
)

func TestClearRefusesAForeignDevice(t *testing.T) {
	b, data := setup(t, pool.Thin)
	device := machine.Losetup(t, data)
	wantError(t, b.Unused(t.Context(), "vol"), state.FailedPrecondition, device, "losetup -d")
	wantError(t, b.Clear(t.Context(), "vol"), state.FailedPrecondition, device)
	losetupDetach(t, device)
	require.NoError(t, b.Clear(t.Context(), "vol"))
}

func TestClearRefusesOpenData(t *testing.T) {
	b, data := setup(t, pool.Thin)
	closeData := openFile(t, data, os.O_RDONLY)
	wantError(t, b.Unused(t.Context(), "vol"), state.FailedPrecondition, data, "open")
	wantError(t, b.Clear(t.Context(), "vol"), state.FailedPrecondition, data, "open")
	closeData()
	require.NoError(t, b.Clear(t.Context(), "vol"))
}
