// Package bench measures what CSI calls cost against the real binary:
//
//	go test -run '^$' -bench . ./test/bench
package bench

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

var capability = &csi.VolumeCapability{
	AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER},
	AccessType: &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: "ext4"}},
}

// node is a plugin with one formatted volume.
type node struct {
	*harness.Plugin
	id, staging string
}

func newNode(b *testing.B) *node {
	n := &node{Plugin: harness.Start(b, harness.Options{})}
	n.staging = filepath.Join(n.KubeletDir, "staging")
	n.id = n.create(b, "bench")
	n.stage(b)
	return n
}

func (n *node) create(b *testing.B, name string) string {
	resp, err := n.Controller.CreateVolume(b.Context(), &csi.CreateVolumeRequest{
		Name: name, CapacityRange: &csi.CapacityRange{RequiredBytes: 64 << 20}, VolumeCapabilities: []*csi.VolumeCapability{capability},
	})
	if err != nil {
		b.Fatal(err)
	}
	return resp.GetVolume().GetVolumeId()
}

func (n *node) stage(b *testing.B) {
	_, err := n.Node.NodeStageVolume(b.Context(), &csi.NodeStageVolumeRequest{VolumeId: n.id, StagingTargetPath: n.staging, VolumeCapability: capability})
	if err != nil {
		b.Fatal(err)
	}
}

func (n *node) unstage(tb testing.TB) {
	_, err := n.Node.NodeUnstageVolume(context.Background(), &csi.NodeUnstageVolumeRequest{VolumeId: n.id, StagingTargetPath: n.staging})
	if err != nil {
		tb.Fatal(err)
	}
}

func (n *node) publish(b *testing.B, path string) {
	_, err := n.Node.NodePublishVolume(b.Context(), &csi.NodePublishVolumeRequest{VolumeId: n.id, StagingTargetPath: n.staging, TargetPath: path, VolumeCapability: capability})
	if err != nil {
		b.Fatal(err)
	}
}

func (n *node) unpublish(b *testing.B, path string) {
	_, err := n.Node.NodeUnpublishVolume(b.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: n.id, TargetPath: path})
	if err != nil {
		b.Fatal(err)
	}
}

func BenchmarkProbe(b *testing.B) {
	n := newNode(b)
	for b.Loop() {
		if _, err := n.Identity.Probe(b.Context(), &csi.ProbeRequest{}); err != nil {
			b.Fatal(err)
		}
	}
	n.unstage(b)
}

// A formatted volume is attached, mounted, unmounted and detached.
func BenchmarkStageUnstage(b *testing.B) {
	n := newNode(b)
	n.unstage(b)
	for b.Loop() {
		n.stage(b)
		n.unstage(b)
	}
}

func BenchmarkPublishUnpublish(b *testing.B) {
	n := newNode(b)
	path := filepath.Join(n.KubeletDir, "pod")
	for b.Loop() {
		n.publish(b, path)
		n.unpublish(b, path)
	}
	n.unstage(b)
}

// The same publish again, as with requiresRepublish: it changes nothing.
func BenchmarkRepublish(b *testing.B) {
	n := newNode(b)
	path := filepath.Join(n.KubeletDir, "pod")
	n.publish(b, path)
	for b.Loop() {
		n.publish(b, path)
	}
	n.unpublish(b, path)
	n.unstage(b)
}

// A new volume's whole life, mkfs included.
func BenchmarkLife(b *testing.B) {
	n := newNode(b)
	n.unstage(b)
	path := filepath.Join(n.KubeletDir, "pod")
	for i := 0; b.Loop(); i++ {
		n.id = n.create(b, fmt.Sprint("life-", i))
		n.stage(b)
		n.publish(b, path)
		n.unpublish(b, path)
		n.unstage(b)
		if _, err := n.Controller.DeleteVolume(b.Context(), &csi.DeleteVolumeRequest{VolumeId: n.id}); err != nil {
			b.Fatal(err)
		}
	}
	if _, err := os.Stat(path); err == nil {
		b.Error("a target is left")
	}
}

// A pod's own volume: made, formatted, staged and published by one call, and deleted
// by another.
func BenchmarkInline(b *testing.B) {
	n := newNode(b)
	n.unstage(b)
	path := filepath.Join(n.KubeletDir, "pod")
	for i := 0; b.Loop(); i++ {
		n.id = fmt.Sprint("csi-inline-", i)
		_, err := n.Node.NodePublishVolume(b.Context(), &csi.NodePublishVolumeRequest{VolumeId: n.id, TargetPath: path, VolumeCapability: capability,
			VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.uid": "pod", "size": "64Mi"}})
		if err != nil {
			b.Fatal(err)
		}
		n.unpublish(b, path)
	}
}

// What kubelet asks of each volume about every minute.
func BenchmarkStats(b *testing.B) {
	n := newNode(b)
	path := filepath.Join(n.KubeletDir, "pod")
	n.publish(b, path)
	for b.Loop() {
		if _, err := n.Node.NodeGetVolumeStats(b.Context(), &csi.NodeGetVolumeStatsRequest{VolumeId: n.id, VolumePath: path}); err != nil {
			b.Fatal(err)
		}
	}
	n.unpublish(b, path)
	n.unstage(b)
}
