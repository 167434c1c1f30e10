package chaos

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// volume is one volume and how kubelet calls the plugin for it.
type volume struct {
	*harness.Plugin
	t            testing.TB
	id, fsType   string // fsType "": a raw block device
	provisioning string
	bytes        int64
	staging      string
	targets      []string // of the pods 0, 1 and so on; the last one is read-only
}

// newVolume names the paths of a volume, and makes the directories that kubelet
// would make; the volume itself is yet to be created.
func newVolume(t testing.TB, p *harness.Plugin, id, fsType, provisioning string, bytes int64, pods int) *volume {
	t.Helper()
	v := &volume{Plugin: p, t: t, id: id, fsType: fsType, provisioning: provisioning, bytes: bytes}
	v.staging = filepath.Join(p.KubeletDir, "plugins/kubernetes.io/csi/csi-node.local", id, "globalmount")
	must(t, os.MkdirAll(v.staging, 0o750))
	for pod := range pods {
		v.targets = append(v.targets, v.target(fmt.Sprint(id, "-pod-", pod)))
	}
	return v
}

// target is where kubelet would publish the volume for a pod. It makes the
// directory that the target stands in, as kubelet does.
func (v *volume) target(pod string) string {
	v.t.Helper()
	path := filepath.Join(v.KubeletDir, "pods", pod, "volumes/kubernetes.io~csi", v.id, "mount")
	must(v.t, os.MkdirAll(filepath.Dir(path), 0o750))
	if v.fsType == "" {
		path = filepath.Join(v.KubeletDir, "plugins/kubernetes.io/csi/volumeDevices/publish", v.id, pod)
		must(v.t, os.MkdirAll(filepath.Dir(path), 0o750))
	}
	return path
}

// readOnly reports whether a target is the one for reading.
func (v *volume) readOnly(target string) bool { return target == v.targets[len(v.targets)-1] }

// data is the volume's file in the pool.
func (v *volume) data() string { return filepath.Join(v.PoolDir, "volumes", v.id, "data") }

// facts is what lives with a volume's data.
type facts struct {
	Created    string
	Bytes      int64
	Formatting bool
	Formatted  string
}

// facts reads what the pool knows of the volume; nil when there is none.
func (v *volume) facts() *facts {
	v.t.Helper()
	raw, err := os.ReadFile(filepath.Join(v.PoolDir, "volumes", v.id, "volume.json"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var f facts
	if err := errors.Join(err, json.Unmarshal(raw, &f)); err != nil {
		v.t.Error(err)
		return nil
	}
	return &f
}

// number is that of the volume's device, as mountinfo writes it; "" without one.
func (v *volume) number() string {
	v.t.Helper()
	loops := v.Loops()
	i := slices.IndexFunc(loops, func(l harness.Loop) bool { return l.Backing == v.data() })
	if i < 0 {
		return ""
	}
	raw, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(loops[i].Path), "dev"))
	must(v.t, err)
	return string(raw[:len(raw)-1])
}

func (v *volume) capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER}}
	if v.fsType == "" {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: v.fsType, MountFlags: []string{"noatime"}}}
	}
	return c
}

func (v *volume) create(ctx context.Context) error {
	_, err := v.Controller.CreateVolume(ctx, &csi.CreateVolumeRequest{
		Name: v.id, VolumeCapabilities: []*csi.VolumeCapability{v.capability()},
		CapacityRange: &csi.CapacityRange{RequiredBytes: v.bytes}, Parameters: map[string]string{"provisioning": v.provisioning},
	})
	return err
}

func (v *volume) delete(ctx context.Context) error {
	_, err := v.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.id})
	return err
}

func (v *volume) stage(ctx context.Context) error {
	_, err := v.Node.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, VolumeCapability: v.capability()})
	return err
}

func (v *volume) unstage(ctx context.Context) error {
	_, err := v.Node.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging})
	return err
}

func (v *volume) publish(ctx context.Context, target string) error {
	_, err := v.Node.NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{VolumeId: v.id, StagingTargetPath: v.staging, TargetPath: target,
		VolumeCapability: v.capability(), Readonly: v.readOnly(target)})
	return err
}

func (v *volume) unpublish(ctx context.Context, target string) error {
	_, err := v.Node.NodeUnpublishVolume(ctx, &csi.NodeUnpublishVolumeRequest{VolumeId: v.id, TargetPath: target})
	return err
}

func (v *volume) expand(ctx context.Context, bytes int64) error {
	_, err := v.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: v.id, VolumePath: v.staging, StagingTargetPath: v.staging,
		VolumeCapability: v.capability(), CapacityRange: &csi.CapacityRange{RequiredBytes: bytes}})
	return err
}

// unfinal are the codes after which kubelet asks again.
var unfinal = []codes.Code{codes.DeadlineExceeded, codes.Canceled, codes.Aborted, codes.Unavailable}

// insist makes a call as kubelet does: again and again, until its answer is
// final, and returns that. Between two calls it waits a moment.
func insist(ctx context.Context, call func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, harness.Patience)
	defer cancel()
	for {
		err := call(ctx)
		if !slices.Contains(unfinal, status.Code(err)) || ctx.Err() != nil {
			return err
		}
		pause(10*time.Millisecond, ctx.Done())
	}
}

// mountTable is the mounts of a plugin by their mount points.
type mountTable map[string][]*mountinfo.Info

func mountsOf(t testing.TB, p *harness.Plugin) mountTable {
	t.Helper()
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(p.Dir))
	must(t, err)
	mounts := mountTable{}
	for _, info := range infos {
		mounts[info.Mountpoint] = append(mounts[info.Mountpoint], info)
	}
	return mounts
}

// wrong says what is not as it must be at a path of the volume; "" if all is.
func (v *volume) wrong(mounts mountTable, path string, mounted bool) string {
	v.t.Helper()
	at := mounts[path]
	switch {
	case !mounted && len(at) > 0, mounted && len(at) != 1:
		return fmt.Sprintf("%d mounts at %s, where it is mounted: %t", len(at), path, mounted)
	case !mounted || v.fsType == "":
		return ""
	case fmt.Sprintf("%d:%d", at[0].Major, at[0].Minor) != v.number() || at[0].Root != "/":
		return fmt.Sprintf("at %s is %+v, and its device is %s", path, at[0], v.number())
	}
	readOnly := slices.Contains(strings.Split(at[0].Options, ","), "ro")
	if readOnly != (path != v.staging && v.readOnly(path)) || slices.Contains(strings.Split(at[0].VFSOptions, ","), "ro") {
		return fmt.Sprintf("at %s it is mounted with %s and %s", path, at[0].Options, at[0].VFSOptions)
	}
	return ""
}

// up creates and stages the volume and publishes it at all its targets.
func (v *volume) up() {
	v.t.Helper()
	ctx := v.t.Context()
	must(v.t, v.create(ctx), v.stage(ctx))
	for _, target := range v.targets {
		must(v.t, v.publish(ctx, target))
	}
}

// down takes the volume down and sees that nothing is left of it.
func (v *volume) down() {
	v.t.Helper()
	ctx := v.t.Context()
	for _, target := range v.targets {
		must(v.t, insist(ctx, func(ctx context.Context) error { return v.unpublish(ctx, target) }))
		if _, err := os.Lstat(target); !errors.Is(err, os.ErrNotExist) {
			v.t.Errorf("%s is left after NodeUnpublishVolume (%v)", target, err)
		}
	}
	must(v.t, insist(ctx, v.unstage))
	if number := v.number(); number != "" {
		v.t.Errorf("device %s is attached after NodeUnstageVolume", number)
	}
	must(v.t, insist(ctx, v.delete))
	if v.facts() != nil {
		v.t.Error("the volume is there after DeleteVolume")
	}
}
