// Package bench measures what CSI calls cost against the real binary:
//
//	go test -run '^$' -bench . ./test/bench
package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/csi-node/csi-node/test/harness"
)

func TestMain(m *testing.M) { harness.Main(m) }

// node is a plugin with one volume. A call that fails fails the benchmark.
type node struct{ *harness.Volume }

func newNode(b *testing.B) *node {
	p := harness.Start(b, harness.Options{})
	n := &node{harness.NewVolume(b, p, "bench", harness.Shared("ext4"))}
	n.create(b, 64<<20, "thick")
	n.stage(b)
	return n
}

// next is another volume of the same plugin.
func (n *node) next(b *testing.B, id string) *node {
	return &node{harness.NewVolume(b, n.Plugin, id, n.Capability)}
}

func (n *node) create(b *testing.B, bytes int64, provisioning string) {
	must(b, n.Create(b.Context(), bytes, provisioning))
}

func (n *node) stage(b *testing.B)                  { must(b, n.Stage(b.Context())) }
func (n *node) unstage(b *testing.B)                { must(b, n.Unstage(b.Context())) }
func (n *node) publish(b *testing.B, path string)   { must(b, n.Publish(b.Context(), path)) }
func (n *node) unpublish(b *testing.B, path string) { must(b, n.Unpublish(b.Context(), path)) }

func must(b *testing.B, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

func BenchmarkProbe(b *testing.B) {
	n := newNode(b)
	for b.Loop() {
		_, err := n.Identity.Probe(b.Context(), &csi.ProbeRequest{})
		must(b, err)
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
		v := n.next(b, fmt.Sprint("life-", i))
		v.create(b, 64<<20, "thick")
		v.stage(b)
		v.publish(b, path)
		v.unpublish(b, path)
		v.unstage(b)
		must(b, v.Delete(b.Context()))
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
		v := n.next(b, fmt.Sprint("csi-inline-", i))
		v.Staging, v.Context = "", map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.uid": "pod", "size": "64Mi"}
		v.publish(b, path)
		v.unpublish(b, path)
	}
}

// What kubelet asks of each volume about every minute.
func BenchmarkStats(b *testing.B) {
	n := newNode(b)
	path := filepath.Join(n.KubeletDir, "pod")
	n.publish(b, path)
	for b.Loop() {
		must(b, n.Stats(b.Context(), path))
	}
	n.unpublish(b, path)
	n.unstage(b)
}
