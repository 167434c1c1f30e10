package driver

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/pkg/reconciler"
	"github.com/csi-node/csi-node/test/require"
)

const testVolumeBytes = 8 << 20

// createVolume makes a volume and returns the path of its data.
func createVolume(t *testing.T, c Config, controller csi.ControllerClient, name string) string {
	t.Helper()
	_, err := controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: testVolumeBytes},
		VolumeCapabilities: []*csi.VolumeCapability{rawCapability()},
	})
	require.NoError(t, err)
	return filepath.Join(c.poolDir(), "volumes", name, "data")
}

func rawCapability() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

func TestClearDevice(t *testing.T) {
	c := testConfig(t)
	conn, stop := serving(t, c)
	controller, node := csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	data := createVolume(t, c, controller, "vol")
	ctx := t.Context()

	junk := bytes.Repeat([]byte("junk"), testVolumeBytes/4)
	require.NoError(t, os.WriteFile(data, junk, 0o600))
	found, err := inspectDevice(ctx, c.StateDir, "vol")
	want := reconciler.Clearance{Volume: "vol", Backing: data, Bytes: testVolumeBytes, Found: "data at byte 0"}
	if err != nil || found != want {
		t.Errorf("found %+v (%v), not %+v", found, err, want)
	}
	if now, err := os.ReadFile(data); err != nil || !bytes.Equal(now, junk) {
		t.Errorf("looking has changed the data (%v)", err)
	}

	// In use.
	stage := &csi.NodeStageVolumeRequest{VolumeId: "vol", StagingTargetPath: filepath.Join(c.KubeletDir, "stage"), VolumeCapability: rawCapability()}
	if _, err := node.NodeStageVolume(ctx, stage); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // of a test that fails in between
		_, _ = node.NodeUnstageVolume(context.Background(), &csi.NodeUnstageVolumeRequest{VolumeId: "vol", StagingTargetPath: stage.StagingTargetPath})
	})
	for _, act := range []func(context.Context, string, string) (reconciler.Clearance, error){inspectDevice, clearDevice} {
		_, err := act(ctx, c.StateDir, "vol")
		require.Words(t, err, "vol", "in use", stage.StagingTargetPath, "unstage")
	}
	if _, err := node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: "vol", StagingTargetPath: stage.StagingTargetPath}); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(data)
	require.NoError(t, err)
	for _, act := range []func(context.Context, string, string) (reconciler.Clearance, error){inspectDevice, clearDevice} {
		_, err := act(ctx, c.StateDir, "vol")
		require.Words(t, err, data, "open")
	}
	require.NoError(t, f.Close())
	if now, err := os.ReadFile(data); err != nil || !bytes.Equal(now, junk) {
		t.Errorf("a refusal has changed the data (%v)", err)
	}

	want.Cleared = true
	if done, err := clearDevice(ctx, c.StateDir, "vol"); err != nil || done != want {
		t.Errorf("answers %+v (%v), not %+v", done, err, want)
	}
	if now, err := os.ReadFile(data); err != nil || !bytes.Equal(now, make([]byte, testVolumeBytes)) {
		t.Errorf("the data is not zero (%v)", err)
	}
	if again, err := clearDevice(ctx, c.StateDir, "vol"); err != nil || !again.Blank || !again.Cleared {
		t.Errorf("once more: %+v (%v)", again, err)
	}
	require.NoError(t, os.Truncate(data, 4096))
	_, err = clearDevice(ctx, c.StateDir, "vol")
	require.Words(t, err, data, "fewer")

	_, err = clearDevice(ctx, c.StateDir, "other")
	require.Words(t, err, "other", "no such volume")
	_, err = clearDevice(ctx, c.StateDir, "../vol")
	require.Words(t, err, "volume id")
	_, err = Retry(ctx, c.StateDir, "vol")
	require.Words(t, err, "vol", "nothing is asked")
	require.NoError(t, stop())
	for _, act := range []func() error{
		func() error { _, err := clearDevice(ctx, c.StateDir, "vol"); return err },
		func() error { _, err := Retry(ctx, c.StateDir, "vol"); return err },
	} {
		err := act()
		require.Words(t, err, "no plugin runs", c.StateDir, "--state-dir")
		if !errors.Is(err, errNotRunning) {
			t.Errorf("%v is not errNotRunning", err)
		}
	}
}
