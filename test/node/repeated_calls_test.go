package node

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/csi-node/csi-node/test/harness"
)

// The table of second publishes (CSI spec v1.13, NodePublishVolume).
func TestSecondPublishByAccessMode(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	several := []accessMode{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER,
	}
	one := []accessMode{
		csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
		csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY,
	}
	differ := map[string]func(*csi.NodePublishVolumeRequest){
		"context":         func(r *csi.NodePublishVolumeRequest) { r.VolumeContext = map[string]string{"key": "other"} },
		"publish context": func(r *csi.NodePublishVolumeRequest) { r.PublishContext = map[string]string{"key": "other"} },
		"access type": func(r *csi.NodePublishVolumeRequest) {
			if r.VolumeCapability.GetBlock() != nil {
				r.VolumeCapability = mountAs("ext4", r.VolumeCapability.AccessMode.Mode)
			} else {
				r.VolumeCapability = blockAs(r.VolumeCapability.AccessMode.Mode)
			}
		},
	}
	for _, mode := range append(several, one...) {
		for access, c := range map[string]*csi.VolumeCapability{"mount": mountAs("ext4", mode), "block": blockAs(mode)} {
			t.Run(access+" "+mode.String(), func(t *testing.T) {
				ctx := t.Context()
				v := create(t, p, strings.ToLower(mode.String())+"-"+access, 32*mib, mountAs("ext4", multiWriter))
				must(t, v.Stage(ctx)) // formats it, for the modes of readers
				must(t, v.Unstage(ctx))
				v.Capability = c
				first, second := v.Target("pod-1"), v.Target("pod-2")
				must(t, v.Up(ctx, first))

				before := snapshot(t, p)
				must(t, v.Publish(ctx, first))
				for what, change := range differ {
					differing := v.PublishRequest(first)
					change(differing)
					_, err := v.Node.NodePublishVolume(ctx, differing)
					if mustRefuse(t, err, codes.AlreadyExists, v.ID, first); t.Failed() {
						t.Fatalf("another %s", what)
					}
				}
				mustEqual(t, before, snapshot(t, p))
				if slices.Contains(several, mode) {
					must(t, v.Publish(ctx, second))
				} else {
					mustRefuse(t, v.Publish(ctx, second), codes.FailedPrecondition, v.ID, first)
					mustBeGone(t, second)
					mustEqual(t, before, snapshot(t, p))
				}
				if n := mountsAt(p, first); n != 1 {
					t.Errorf("%d mounts at the first target", n)
				}
				v.End(first, second)
			})
		}
	}
}

// Calls that contradict what stands are refused and leave it as it is.
func TestContradictingCallsAreRefused(t *testing.T) {
	t.Parallel()
	p := harness.Start(t, harness.Options{})
	v := create(t, p, "volume", 32*mib, mountAs("ext4", multiWriter, "noatime"))
	ctx, pod, fresh := t.Context(), v.Target("pod-1"), v.Target("pod-2")
	must(t, v.Up(ctx, pod))
	write(t, filepath.Join(pod, "file"), "kept")

	stage := func(change func(*csi.NodeStageVolumeRequest)) func() error {
		return func() error {
			req := v.StageRequest()
			change(req)
			_, err := v.Node.NodeStageVolume(ctx, req)
			return err
		}
	}
	publish := func(target string, change func(*csi.NodePublishVolumeRequest)) func() error {
		return func() error {
			req := v.PublishRequest(target)
			change(req)
			_, err := v.Node.NodePublishVolume(ctx, req)
			return err
		}
	}
	for _, row := range []struct {
		name string
		call func() error
		code codes.Code
	}{
		{"stage as it is", stage(func(*csi.NodeStageVolumeRequest) {}), codes.OK},
		{"stage with secrets", stage(func(r *csi.NodeStageVolumeRequest) { r.Secrets = map[string]string{"key": "secret"} }), codes.OK},
		{"stage with another fs_type", stage(func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = mountAs("xfs", multiWriter, "noatime") }), codes.AlreadyExists},
		{"stage with other flags", stage(func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = mountAs("ext4", multiWriter) }), codes.AlreadyExists},
		{"stage with another access mode", stage(func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = mountAs("ext4", singleWriter, "noatime") }), codes.AlreadyExists},
		{"stage as a block device", stage(func(r *csi.NodeStageVolumeRequest) { r.VolumeCapability = blockAs(multiWriter) }), codes.AlreadyExists},
		{"stage with another volume context", stage(func(r *csi.NodeStageVolumeRequest) { r.VolumeContext = map[string]string{"key": "value"} }), codes.AlreadyExists},
		{"stage with another publish context", stage(func(r *csi.NodeStageVolumeRequest) { r.PublishContext = map[string]string{"key": "value"} }), codes.AlreadyExists},
		{"stage elsewhere", stage(func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath += "-2" }), codes.AlreadyExists},
		{"unstage while published", func() error { return v.Unstage(ctx) }, codes.FailedPrecondition},
		{"delete while staged", func() error { return v.Delete(ctx) }, codes.FailedPrecondition},

		{"publish as it is", publish(pod, func(*csi.NodePublishVolumeRequest) {}), codes.OK},
		{"publish with a fresh token", publish(pod, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeContext = map[string]string{"csi.storage.k8s.io/serviceAccount.tokens": "secret"}
		}), codes.OK},
		{"publish read-only", publish(pod, func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }), codes.AlreadyExists},
		{"publish with other flags", publish(pod, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = mountAs("ext4", multiWriter, "noexec") }), codes.AlreadyExists},
		{"publish with another access mode", publish(pod, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = mountAs("ext4", singleWriter, "noatime") }), codes.AlreadyExists},
		{"publish anew with another fs_type", publish(fresh, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = mountAs("xfs", multiWriter) }), codes.FailedPrecondition},
		{"publish anew as a block device", publish(fresh, func(r *csi.NodePublishVolumeRequest) { r.VolumeCapability = blockAs(multiWriter) }), codes.FailedPrecondition},
		{"publish anew with a flag of the superblock", publish(fresh, func(r *csi.NodePublishVolumeRequest) {
			r.VolumeCapability = mountAs("ext4", multiWriter, "data=journal")
		}), codes.InvalidArgument},
		{"publish from another staging path", publish(fresh, func(r *csi.NodePublishVolumeRequest) { r.StagingTargetPath += "-2" }), codes.FailedPrecondition},
		{"publish below a directory that is missing", publish(fresh+"/a/b", func(*csi.NodePublishVolumeRequest) {}), codes.FailedPrecondition},
	} {
		t.Run(row.name, func(t *testing.T) {
			before, report := snapshot(t, p), p.Status().Volumes
			mustRefuse(t, row.call(), row.code)
			mustEqual(t, before, snapshot(t, p))
			for i, part := range p.Status().Volumes[0].Parts {
				if was := report[0].Parts[i]; was.Part != part.Part || was.Asked != part.Asked || was.Is != part.Is || !was.Since.Equal(part.Since) {
					t.Errorf("%s: %+v, was %+v", part.Part, part, was)
				}
			}
		})
	}
	mustRefuse(t, v.Unstage(ctx), codes.FailedPrecondition, pod)
	mustRead(t, filepath.Join(pod, "file"), "kept")
	v.End(pod)
}
