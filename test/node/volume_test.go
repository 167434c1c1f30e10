package node

import (
	"context"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

const mib = 1 << 20

// Access modes, as short as tables need them.
const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	readerOnly   = csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
)

type accessMode = csi.VolumeCapability_AccessMode_Mode

// fsTypes are the file systems that the plugin makes.
var fsTypes = []string{"ext4", "xfs", "btrfs"}

func mountAs(fsType string, mode accessMode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

func blockAs(mode accessMode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

// smallest is a size in bytes that suits a file system, and raw blocks.
func smallest(fsType string) int64 {
	switch fsType {
	case "xfs":
		return 320 * mib // mkfs.xfs makes nothing under 300 MiB
	case "btrfs":
		return 256 * mib // the plugin makes none that is smaller
	}
	return 32 * mib
}

// volume is one volume and how kubelet calls the plugin for it. Its methods
// return what the plugin answers; the tests say what that must be.
type volume struct {
	*harness.Plugin
	t          *testing.T
	id         string
	staging    string
	capability *csi.VolumeCapability
	context    map[string]string
}

// create makes a thin volume of bytes; staging is where it will be staged.
func create(t *testing.T, p *harness.Plugin, name string, bytes int64, c *csi.VolumeCapability) *volume {
	t.Helper()
	return createAs(t, p, name, bytes, c, "thin")
}

func createAs(t *testing.T, p *harness.Plugin, name string, bytes int64, c *csi.VolumeCapability, provisioning string) *volume {
	t.Helper()
	resp, err := p.Controller.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
		Name:               name,
		CapacityRange:      &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{c},
		Parameters:         map[string]string{"provisioning": provisioning},
	})
	must(t, err)
	if got := resp.GetVolume().GetCapacityBytes(); got != bytes {
		t.Fatalf("CreateVolume: %d bytes, asked for %d", got, bytes)
	}
	v := &volume{Plugin: p, t: t, id: resp.GetVolume().GetVolumeId(), capability: c}
	v.staging = v.path("plugins/kubernetes.io/csi/csi-node.local", v.id, "globalmount")
	makeDir(t, filepath.Dir(v.staging))
	return v
}

// path is a path below the kubelet directory.
func (v *volume) path(elements ...string) string {
	return filepath.Join(append([]string{v.KubeletDir}, elements...)...)
}

// data is the volume's file in the pool.
func (v *volume) data() string { return filepath.Join(v.PoolDir, "volumes", v.id, "data") }

// target is where kubelet would publish the volume for a pod. It makes the
// directory that the target stands in, as kubelet does.
func (v *volume) target(pod string) string {
	v.t.Helper()
	makeDir(v.t, v.path("pods", pod))
	path := v.path("pods", pod, "volumes/kubernetes.io~csi", v.id, "mount")
	if v.capability.GetBlock() != nil {
		path = v.path("plugins/kubernetes.io/csi/volumeDevices/publish", v.id, pod)
	}
	makeDir(v.t, filepath.Dir(path))
	return path
}

func (v *volume) stageRequest() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.capability, VolumeContext: v.context}
}

func (v *volume) stage(ctx context.Context) error {
	_, err := v.Node.NodeStageVolume(ctx, v.stageRequest())
	return err
}

func (v *volume) unstage(ctx context.Context) error {
	_, err := v.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func (v *volume) publishRequest(target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: target, VolumeCapability: v.capability, VolumeContext: v.context}
}

func (v *volume) publish(ctx context.Context, target string) error {
	_, err := v.Node.NodePublishVolume(ctx, v.publishRequest(target))
	return err
}

func (v *volume) publishReadOnly(ctx context.Context, target string) error {
	req := v.publishRequest(target)
	req.Readonly = true
	_, err := v.Node.NodePublishVolume(ctx, req)
	return err
}

func (v *volume) unpublish(ctx context.Context, target string) error {
	_, err := v.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target})
	return err
}

// expand asks for a size in bytes, by the staging path.
func (v *volume) expand(ctx context.Context, bytes int64) (int64, error) {
	resp, err := v.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
		VolumeId: v.id, VolumePath: v.staging, StagingTargetPath: v.staging, VolumeCapability: v.capability,
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	})
	return resp.GetCapacityBytes(), err
}

// total is the size in bytes that NodeGetVolumeStats tells.
func (v *volume) total(path string) int64 {
	v.t.Helper()
	resp, err := v.Node.NodeGetVolumeStats(v.t.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: v.id, VolumePath: path})
	must(v.t, err)
	if len(resp.GetUsage()) == 0 || resp.GetUsage()[0].GetUnit() != csi.VolumeUsage_BYTES {
		v.t.Fatalf("NodeGetVolumeStats of %s: %v", path, resp)
	}
	return resp.GetUsage()[0].GetTotal()
}

func (v *volume) delete(ctx context.Context) error {
	_, err := v.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

// end takes the volume down and sees that nothing is left of it.
func (v *volume) end(targets ...string) {
	v.t.Helper()
	ctx := v.t.Context()
	for _, target := range targets {
		must(v.t, v.unpublish(ctx, target))
		mustBeGone(v.t, target)
	}
	must(v.t, v.unstage(ctx))
	if loops := v.Loops(); len(loops) > 0 {
		v.t.Errorf("attached after NodeUnstageVolume: %v", loops)
	}
	must(v.t, v.delete(ctx))
	mustBeGone(v.t, filepath.Dir(v.data()))
	mustHaveNoRecord(v.t, v.Plugin)
}
