package bench

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

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
				must(b, unix.Unmount(path, unix.MNT_DETACH))
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
	must(b, unix.Stat(n.Staging, &staged))
	return at.Dev == staged.Dev
}

// crowd makes mounts that have nothing to do with the plugin, and returns what
// removes them.
func (n *node) crowd(b *testing.B, mounts int) (remove func()) {
	dir := filepath.Join(n.Dir, "crowd")
	must(b, os.Mkdir(dir, 0o750))
	must(b, unix.Mount("crowd", dir, "tmpfs", 0, "size=1m"))
	must(b, unix.Mount("", dir, "", unix.MS_PRIVATE, ""))
	remove = func() {
		must(b, unix.Unmount(dir, unix.MNT_DETACH)) // and all that is below
	}
	for i := range mounts {
		path := filepath.Join(dir, strconv.Itoa(i))
		must(b, os.Mkdir(path, 0o750))
		must(b, unix.Mount("other", path, "tmpfs", 0, "size=4k"))
	}
	return remove
}

// The processor time that the plugin takes in so long while nothing happens to
// its published volumes, extrapolated to a minute.
func BenchmarkIdle(b *testing.B) {
	const wait = 20 * time.Second
	for _, volumes := range []int{1, 1000} {
		b.Run(fmt.Sprint("volumes=", volumes), func(b *testing.B) {
			p := harness.Start(b, harness.Options{})
			var all []*node
			for i := range volumes {
				v := &node{harness.NewVolume(b, p, fmt.Sprint("idle-", i), harness.Shared("ext4"))}
				v.create(b, 4<<20, "thin")
				v.stage(b)
				v.publish(b, v.Staging+"-pod")
				all = append(all, v)
			}
			p.AwaitRest()
			var cpu time.Duration
			for range b.N {
				before := cpuTime(b, p)
				time.Sleep(wait)
				cpu += cpuTime(b, p) - before
			}
			b.ReportMetric(cpu.Seconds()*1e3/float64(b.N)*float64(time.Minute/wait), "cpu-ms/min")
			for _, v := range all {
				v.unpublish(b, v.Staging+"-pod")
				v.unstage(b)
			}
		})
	}
}

// cpuTime is the processor time of the plugin so far: utime and stime of proc(5), in
// ticks of a hundredth of a second.
func cpuTime(b *testing.B, p *harness.Plugin) time.Duration {
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.PID()))
	must(b, err)
	fields := strings.Fields(string(raw[strings.LastIndexByte(string(raw), ')')+1:]))
	var ticks int64
	for _, field := range fields[11:13] {
		t, err := strconv.ParseInt(field, 10, 64)
		must(b, err)
		ticks += t
	}
	return time.Duration(ticks) * 10 * time.Millisecond
}
