package harness

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/pkg/report"
	"github.com/csi-node/csi-node/test/require"
)

// Volume is one volume and how kubelet calls the plugin for it: at the paths that
// kubelet would choose, with the fields that it would set. Its methods return what
// the plugin answers; the tests say what that must be.
type Volume struct {
	*Plugin
	T          testing.TB
	ID         string
	Staging    string
	Capability *csi.VolumeCapability
	Context    map[string]string
	Secrets    map[string]string // of Stage and Publish

	// PublishContext is what ControllerPublishVolume answered.
	PublishContext map[string]string
}

// NewVolume names a volume and makes the directory that its staging path stands
// in. The volume itself is yet to be created.
func NewVolume(t testing.TB, p *Plugin, id string, c *csi.VolumeCapability) *Volume {
	t.Helper()
	v := &Volume{Plugin: p, T: t, ID: id, Capability: c}
	v.Staging = v.Path("plugins/kubernetes.io/csi/csi-node.local", id, "globalmount")
	v.makeDir(filepath.Dir(v.Staging))
	return v
}

// MountAs is the capability of a volume with a file system.
func MountAs(fsType string, mode csi.VolumeCapability_AccessMode_Mode, flags ...string) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fsType, MountFlags: flags}},
	}
}

// BlockAs is the capability of a raw block volume.
func BlockAs(mode csi.VolumeCapability_AccessMode_Mode) *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}

// Shared is the capability of a volume that all pods of the node may write to. An
// fsType of "" is a raw block volume.
func Shared(fsType string, flags ...string) *csi.VolumeCapability {
	const mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	if fsType == "" {
		return BlockAs(mode)
	}
	return MountAs(fsType, mode, flags...)
}

// Path is a path below the kubelet directory.
func (v *Volume) Path(elements ...string) string {
	return filepath.Join(append([]string{v.KubeletDir}, elements...)...)
}

// Data is the volume's file in the pool.
func (v *Volume) Data() string { return filepath.Join(v.PoolDir, "volumes", v.ID, "data") }

// Devices returns the loop devices over the volume's file: one, while it is staged.
func (v *Volume) Devices() []Loop {
	v.T.Helper()
	return slices.DeleteFunc(v.Loops(), func(l Loop) bool { return l.Backing != v.Data() })
}

// Target is where kubelet would publish the volume for a pod. It makes the
// directory that the target stands in, as kubelet does.
func (v *Volume) Target(pod string) string {
	v.T.Helper()
	v.makeDir(v.Path("pods", pod))
	path := v.Path("pods", pod, "volumes/kubernetes.io~csi", v.ID, "mount")
	if v.Capability.GetBlock() != nil {
		path = v.Path("plugins/kubernetes.io/csi/volumeDevices/publish", v.ID, pod)
	}
	v.makeDir(filepath.Dir(path))
	return path
}

// CreateRequest asks for a volume of a size, with the parameters of a storage class.
func (v *Volume) CreateRequest(bytes int64, parameters map[string]string) *csi.CreateVolumeRequest {
	return &csi.CreateVolumeRequest{
		Name: v.ID, CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
		VolumeCapabilities: []*csi.VolumeCapability{v.Capability}, Parameters: parameters,
	}
}

// Create makes the volume, thin or thick. Its name is to become its id. One that was made
// before may have grown since.
func (v *Volume) Create(ctx context.Context, bytes int64, provisioning string) error {
	resp, err := v.Controller.CreateVolume(ctx, v.CreateRequest(bytes, map[string]string{"provisioning": provisioning}))
	if got := resp.GetVolume(); err == nil && (got.GetVolumeId() != v.ID || got.GetCapacityBytes() < bytes) {
		v.T.Errorf("CreateVolume of %s with %d bytes made %v", v.ID, bytes, got)
	}
	return err
}

// Delete deletes the volume.
func (v *Volume) Delete(ctx context.Context) error {
	_, err := v.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.ID})
	return err
}

// StageRequest is what Stage sends.
func (v *Volume) StageRequest() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging, VolumeCapability: v.Capability, VolumeContext: v.Context, PublishContext: v.PublishContext, Secrets: v.Secrets}
}

// Stage calls NodeStageVolume.
func (v *Volume) Stage(ctx context.Context) error {
	_, err := v.Node.NodeStageVolume(ctx, v.StageRequest())
	return err
}

// Unstage calls NodeUnstageVolume.
func (v *Volume) Unstage(ctx context.Context) error {
	_, err := v.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging})
	return err
}

// PublishRequest is what Publish sends.
func (v *Volume) PublishRequest(target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.Staging, TargetPath: target, VolumeCapability: v.Capability, VolumeContext: v.Context, PublishContext: v.PublishContext, Secrets: v.Secrets}
}

// Publish calls NodePublishVolume.
func (v *Volume) Publish(ctx context.Context, target string) error {
	_, err := v.Node.NodePublishVolume(ctx, v.PublishRequest(target))
	return err
}

// PublishReadOnly is Publish for a pod that may only read.
func (v *Volume) PublishReadOnly(ctx context.Context, target string) error {
	req := v.PublishRequest(target)
	req.Readonly = true
	_, err := v.Node.NodePublishVolume(ctx, req)
	return err
}

// Unpublish calls NodeUnpublishVolume.
func (v *Volume) Unpublish(ctx context.Context, target string) error {
	_, err := v.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: target})
	return err
}

// Up is Stage, and Publish at each target: the first error ends it.
func (v *Volume) Up(ctx context.Context, targets ...string) error {
	err := v.Stage(ctx)
	for _, target := range targets {
		if err == nil {
			err = v.Publish(ctx, target)
		}
	}
	return err
}

// Down is Unpublish at each target, and Unstage: the first error ends it.
func (v *Volume) Down(ctx context.Context, targets ...string) error {
	for _, target := range targets {
		if err := v.Unpublish(ctx, target); err != nil {
			return err
		}
	}
	return v.Unstage(ctx)
}

// Expand asks for a size by the staging path, and returns what the volume has then.
func (v *Volume) Expand(ctx context.Context, bytes int64) (int64, error) {
	return v.ExpandAt(ctx, v.Staging, bytes)
}

// ExpandRequest is what ExpandAt sends.
func (v *Volume) ExpandRequest(path string, bytes int64) *csi.NodeExpandVolumeRequest {
	return &csi.NodeExpandVolumeRequest{
		VolumeId: v.ID, VolumePath: path, StagingTargetPath: v.Staging, VolumeCapability: v.Capability,
		CapacityRange: &csi.CapacityRange{RequiredBytes: bytes},
	}
}

// ExpandAt is Expand by any path of the volume.
func (v *Volume) ExpandAt(ctx context.Context, path string, bytes int64) (int64, error) {
	resp, err := v.Node.NodeExpandVolume(ctx, v.ExpandRequest(path, bytes))
	return resp.GetCapacityBytes(), err
}

// StatsRequest is what Stats sends.
func (v *Volume) StatsRequest(path string) *csi.NodeGetVolumeStatsRequest {
	return &csi.NodeGetVolumeStatsRequest{VolumeId: v.ID, VolumePath: path}
}

// Stats calls NodeGetVolumeStats.
func (v *Volume) Stats(ctx context.Context, path string) error {
	_, err := v.Node.NodeGetVolumeStats(ctx, v.StatsRequest(path))
	return err
}

// Total is the size in bytes that NodeGetVolumeStats tells; the test fails without one.
func (v *Volume) Total(path string) int64 {
	v.T.Helper()
	resp, err := v.Node.NodeGetVolumeStats(v.T.Context(), v.StatsRequest(path))
	if err != nil || len(resp.GetUsage()) == 0 || resp.GetUsage()[0].GetUnit() != csi.VolumeUsage_BYTES {
		v.T.Fatalf("NodeGetVolumeStats of %s: %v, %v", path, resp, err)
	}
	return resp.GetUsage()[0].GetTotal()
}

// End takes the volume down, by calls that must succeed at once, and sees that
// nothing is left of it.
func (v *Volume) End(targets ...string) {
	v.T.Helper()
	v.takeDown(func(ctx context.Context, call func(context.Context) error) error { return call(ctx) }, targets)
}

// EndInTime is End by calls that are repeated as kubelet does: what they meet may
// be held for a moment.
func (v *Volume) EndInTime(targets ...string) {
	v.T.Helper()
	v.takeDown(Insist, targets)
}

func (v *Volume) takeDown(by func(context.Context, func(context.Context) error) error, targets []string) {
	v.T.Helper()
	must := func(what string, call func(context.Context) error) {
		v.T.Helper()
		if err := by(v.T.Context(), call); err != nil {
			v.T.Fatalf("volume %s: %s: %v", v.ID, what, err)
		}
	}
	mustBeGone := func(path string) {
		v.T.Helper()
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			v.T.Errorf("volume %s is down, and %s is there (%v)", v.ID, path, err)
		}
	}
	for _, target := range targets {
		must("unpublish "+target, func(ctx context.Context) error { return v.Unpublish(ctx, target) })
		mustBeGone(target)
	}
	must("unstage", v.Unstage)
	if devices := v.Devices(); len(devices) > 0 {
		v.T.Errorf("volume %s is unstaged, and attached as %+v", v.ID, devices)
	}
	must("delete", v.Delete)
	mustBeGone(filepath.Dir(v.Data()))
	if parts := v.parts(); parts != nil {
		v.T.Errorf("volume %s is down, and its status is %+v", v.ID, parts)
	}
}

// Unsettled tells what of the volume is not as it is asked for, "" if all is. A
// volume that nothing is asked of has no record.
func (v *Volume) Unsettled() string {
	v.T.Helper()
	parts, text := v.parts(), ""
	if parts == nil {
		return "no record"
	}
	for _, part := range parts {
		if part.Is != report.Settled {
			text += string(part.Part) + " is " + string(part.Is) + ": " + part.Error + "\n"
		}
	}
	return text
}

// Leaving reports whether a part of the volume is asked to go and has not gone.
func (v *Volume) Leaving() bool {
	v.T.Helper()
	return slices.ContainsFunc(v.parts(), func(part report.PartStatus) bool { return strings.HasPrefix(part.Asked, "gone") })
}

// parts are those of the volume's record; nil when there is none.
func (v *Volume) parts() []report.PartStatus {
	v.T.Helper()
	for _, record := range v.Report().Volumes {
		if record.Volume == v.ID {
			return record.Parts
		}
	}
	return nil
}

// unfinal are the codes after which kubelet asks again.
var unfinal = []codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Unavailable}

// Final reports whether an answer is the last: after another the work may go on, and kubelet asks again.
func Final(err error) bool { return !slices.Contains(unfinal, status.Code(err)) }

// Insist makes a call as kubelet does: again and again, until its answer is final,
// and returns that. Between two calls it waits a moment.
func Insist(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, Patience)
	defer cancel()
	for {
		err := call(ctx)
		if Final(err) || ctx.Err() != nil {
			return err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

func (v *Volume) makeDir(path string) {
	v.T.Helper()
	require.NoError(v.T, os.MkdirAll(path, 0o750))
}
