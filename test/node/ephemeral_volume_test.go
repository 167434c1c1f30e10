package node

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/pkg/state/store"
	"github.com/csi-node/csi-node/test/harness"
)

// inline is an inline ephemeral volume of a pod, as kubelet asks for it.
type inline struct {
	*volume
	pod    string // target path
	asking map[string]string
}

func newInline(t *testing.T, p *harness.Plugin, id string, c *csi.VolumeCapability, attributes map[string]string) *inline {
	t.Helper()
	v := &inline{volume: &volume{Plugin: p, T: t, ID: id, Capability: c}, asking: map[string]string{
		"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.uid": id + "-pod", "csi.storage.k8s.io/pod.name": "web",
	}}
	for key, value := range attributes {
		v.asking[key] = value
	}
	v.pod = v.Target(id + "-pod")
	return v
}

func (v *inline) publishInline(ctx context.Context, change ...func(*csi.NodePublishVolumeRequest)) error {
	req := &csi.NodePublishVolumeRequest{VolumeId: v.ID, TargetPath: v.pod, VolumeCapability: v.Capability, VolumeContext: v.asking}
	for _, c := range change {
		c(req)
	}
	_, err := v.Node.NodePublishVolume(ctx, req)
	return err
}

// gone checks that nothing is left of the volume.
func (v *inline) gone() {
	v.T.Helper()
	mustBeGone(v.T, v.pod)
	mustBeGone(v.T, filepath.Dir(v.Data()))
	mustBeGone(v.T, v.Path("plugins/csi-node.local-ephemeral", v.ID))
	mustHaveNoRecord(v.T, v.Plugin)
	if loops := v.Loops(); len(loops) > 0 {
		v.T.Errorf("attached: %v", loops)
	}
}

// An inline ephemeral volume is there with its publish and gone with its end,
// whatever becomes of the plugin in between.
func TestLifeOfAnInlineVolume(t *testing.T) {
	t.Parallel()
	for _, fsType := range []string{"ext4", "xfs", ""} {
		t.Run("as "+fsType, func(t *testing.T) {
			t.Parallel()
			p := harness.Start(t, harness.Options{})
			v := newInline(t, p, "csi-inline", mountAs(fsType, singleWriter, "noatime"), map[string]string{"size": "400Mi", "provisioning": "thin"})
			must(t, v.publishInline(t.Context()))
			must(t, v.publishInline(t.Context()))
			info, err := os.Stat(v.Data())
			must(t, err)
			if info.Size() != 400*mib {
				t.Errorf("the volume has %d bytes", info.Size())
			}
			write(t, filepath.Join(v.pod, "file"), "kept")
			mustRefuse(t, v.publishInline(t.Context(), func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }), codes.AlreadyExists)
			mustRefuse(t, v.publishInline(t.Context(), func(r *csi.NodePublishVolumeRequest) { r.TargetPath = v.Target("another-pod") }), codes.AlreadyExists)
			must(t, v.Unpublish(t.Context(), v.Path("pods/another-pod/volumes/kubernetes.io~csi", v.ID, "mount")))
			p.Kill()
			p.Start(harness.Options{})
			must(t, v.publishInline(t.Context()))
			mustRead(t, filepath.Join(v.pod, "file"), "kept")
			must(t, v.Unpublish(t.Context(), v.pod))
			v.gone()
			must(t, v.Unpublish(t.Context(), v.pod))
			must(t, v.publishInline(t.Context()))
			mustBeGone(t, filepath.Join(v.pod, "file"))
			must(t, v.Unpublish(t.Context(), v.pod))
			v.gone()
		})
	}
}

// A pod that is gone without an unpublish takes its volume with it.
func TestInlineVolumeOfAPodThatIsGone(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := newInline(t, p, "csi-inline", mountAs("ext4", singleWriter), map[string]string{"size": "32Mi"})
	alive := newInline(t, p, "csi-alive", mountAs("ext4", singleWriter), map[string]string{"size": "32Mi"})
	for _, v := range []*inline{v, alive} {
		must(t, v.publishInline(t.Context()))
	}
	p.Kill()
	harness.Command(t, "umount", v.pod)
	must(t, os.RemoveAll(v.Path("pods/csi-inline-pod")))
	p.Start(harness.Options{})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	must(t, p.Log.Await(ctx, "Deleted the ephemeral volume of a pod that is gone"))
	mustBeGone(t, filepath.Dir(v.Data()))
	must(t, alive.Unpublish(t.Context(), alive.pod))
	v.gone()
	alive.gone()
}

// What the pool has no more is taken down with its publish, also if its record was lost.
func TestInlineVolumeThatThePoolHasNoMore(t *testing.T) {
	t.Parallel()
	for _, lost := range []bool{false, true} {
		p := harness.Start(t, harness.Options{})
		v := newInline(t, p, "csi-inline", mountAs("ext4", singleWriter), map[string]string{"size": "32Mi"})
		must(t, v.publishInline(t.Context()))
		p.Kill()
		must(t, os.RemoveAll(filepath.Dir(v.Data())))
		if lost {
			must(t, os.RemoveAll(filepath.Join(p.StateDir, store.Directory)))
		}
		p.Start(harness.Options{})
		must(t, v.Unpublish(t.Context(), v.pod))
		v.gone()
	}
}
