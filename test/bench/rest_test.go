package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
)

// From the moment at which a target is unmounted behind the plugin's back until
// it is there again, on a node with so many other mounts. Each loss counts as a
// story of its own: kubelet asks in between.
func BenchmarkRepair(b *testing.B) {
	for _, others := range []int{0, 5000} {
		b.Run(fmt.Sprint("mounts=", others), func(b *testing.B) {
			n := newNode(b)
			path := filepath.Join(n.KubeletDir, "pod")
			n.publish(b, path)
			remove := n.crowd(b, others)
			var total time.Duration
			for b.Loop() {
				n.AwaitRest()
				start := time.Now()
				if err := unix.Unmount(path, unix.MNT_DETACH); err != nil {
					b.Fatal(err)
				}
				for !n.shows(b, path) {
				}
				total += time.Since(start)
				n.forgive(b, path)
			}
			b.ReportMetric(0, "ns/op") // of all that is around it
			b.ReportMetric(float64(total.Microseconds())/1e3/float64(b.N), "ms/repair")
			remove()
			n.unpublish(b, path)
			n.unstage(b)
		})
	}
}

// forgive lets the next loss be the first of its kind: a volume that is lost
// again soon is repaired later and later.
func (n *node) forgive(b *testing.B, path string) {
	n.unpublish(b, path)
	n.publish(b, path)
}

// shows reports whether the volume is what is seen at a path.
func (n *node) shows(b *testing.B, path string) bool {
	var at, staged unix.Stat_t
	if err := unix.Stat(path, &at); err != nil {
		return false // it comes
	}
	if err := unix.Stat(n.staging, &staged); err != nil {
		b.Fatal(err)
	}
	return at.Dev == staged.Dev
}

// crowd makes mounts that have nothing to do with the plugin, and returns what
// removes them.
func (n *node) crowd(b *testing.B, mounts int) (remove func()) {
	dir := filepath.Join(n.Dir, "crowd")
	if err := os.Mkdir(dir, 0o750); err != nil {
		b.Fatal(err)
	}
	if err := unix.Mount("crowd", dir, "tmpfs", 0, "size=1m"); err != nil {
		b.Fatal(err)
	}
	if err := unix.Mount("", dir, "", unix.MS_PRIVATE, ""); err != nil {
		b.Fatal(err)
	}
	remove = func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil { // and all that is below
			b.Fatal(err)
		}
	}
	for i := range mounts {
		path := filepath.Join(dir, strconv.Itoa(i))
		if err := os.Mkdir(path, 0o750); err != nil {
			b.Fatal(err)
		}
		if err := unix.Mount("other", path, "tmpfs", 0, "size=4k"); err != nil {
			b.Fatal(err)
		}
	}
	return remove
}

// The processor time that the plugin takes in so long while nothing happens to
// its published volumes, extrapolated to a minute.
func BenchmarkIdle(b *testing.B) {
	const wait = 20 * time.Second
	for _, volumes := range []int{1, 1000} {
		b.Run(fmt.Sprint("volumes=", volumes), func(b *testing.B) {
			n := &node{Plugin: harness.Start(b, harness.Options{})}
			var all []node
			for i := range volumes {
				v := node{Plugin: n.Plugin, staging: filepath.Join(n.KubeletDir, "stages", strconv.Itoa(i)), id: fmt.Sprint("idle-", i)}
				if err := os.MkdirAll(v.staging, 0o750); err != nil {
					b.Fatal(err)
				}
				v.createThin(b)
				v.stage(b)
				v.publish(b, v.staging+"-pod")
				all = append(all, v)
			}
			n.AwaitRest()
			var cpu time.Duration
			for range b.N {
				before := n.cpu(b)
				time.Sleep(wait)
				cpu += n.cpu(b) - before
			}
			b.ReportMetric(cpu.Seconds()*1e3/float64(b.N)*float64(time.Minute/wait), "cpu-ms/min")
			for _, v := range all {
				v.unpublish(b, v.staging+"-pod")
				v.unstage(b)
			}
		})
	}
}

// The processor time that the plugin itself takes for the whole life of a small
// volume, from creation to deletion, while it holds so many others.
func BenchmarkLifeBesideOthers(b *testing.B) {
	for _, volumes := range []int{0, 300} {
		b.Run(fmt.Sprint("volumes=", volumes), func(b *testing.B) {
			n := &node{Plugin: harness.Start(b, harness.Options{})}
			bringUp := func(id string) node {
				v := node{Plugin: n.Plugin, staging: filepath.Join(n.KubeletDir, "stages", id), id: id}
				if err := os.MkdirAll(v.staging, 0o750); err != nil {
					b.Fatal(err)
				}
				v.createThin(b)
				v.stage(b)
				v.publish(b, v.staging+"-pod")
				return v
			}
			takeDown := func(v node) {
				v.unpublish(b, v.staging+"-pod")
				v.unstage(b)
			}
			var held []node
			for i := range volumes {
				held = append(held, bringUp(fmt.Sprint("held-", i)))
			}
			n.AwaitRest()
			before := n.cpu(b)
			for i := 0; b.Loop(); i++ {
				v := bringUp(fmt.Sprint("life-", i))
				takeDown(v)
				if _, err := n.Controller.DeleteVolume(b.Context(), &csi.DeleteVolumeRequest{VolumeId: v.id}); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((n.cpu(b)-before).Seconds()*1e3/float64(b.N), "own-cpu-ms/op")
			for _, v := range held {
				takeDown(v)
			}
		})
	}
}

// createThin makes a small volume that takes no space.
func (n *node) createThin(b *testing.B) {
	_, err := n.Controller.CreateVolume(b.Context(), &csi.CreateVolumeRequest{
		Name: n.id, CapacityRange: &csi.CapacityRange{RequiredBytes: 4 << 20}, VolumeCapabilities: []*csi.VolumeCapability{capability},
		Parameters: map[string]string{"provisioning": "thin"},
	})
	if err != nil {
		b.Fatal(err)
	}
}

// cpu is the processor time of the plugin so far: utime and stime of proc(5), in
// ticks of a hundredth of a second.
func (n *node) cpu(b *testing.B) time.Duration {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.PID()))
	if err != nil {
		b.Fatal(err)
	}
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] {
		t, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			b.Fatal(err)
		}
		ticks += t
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
