package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/csi-node/csi-node/test/harness"
	"github.com/csi-node/csi-node/test/machine"
)

// mountPool mounts a new file system where the plugin's pool is to be.
func mountPool(t *testing.T, p *harness.Plugin, bytes int64, mkfs ...string) {
	t.Helper()
	image := machine.Image(t, bytes)
	harness.Command(t, mkfs[0], append(mkfs[1:], image)...)
	must(t, os.MkdirAll(p.PoolDir, 0o700))
	harness.Command(t, "mount", "-o", "loop", image, p.PoolDir)
	t.Cleanup(func() { // the plugin still runs; what is left is told by the harness
		if err := unix.Unmount(p.PoolDir, unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			t.Error(err)
		}
	})
}

// Whatever has become of the pool, a volume is
// unpublished, unstaged and detached.
func TestTeardownNeedsNoFacts(t *testing.T) {
	t.Parallel()
	facts := func(v *volume) string { return filepath.Join(filepath.Dir(v.Data()), "volume.json") }
	for title, breakIt := range map[string]func(t *testing.T, v *volume){
		"damaged facts":       func(t *testing.T, v *volume) { write(t, facts(v), "garbage") },
		"empty facts":         func(t *testing.T, v *volume) { write(t, facts(v), "") },
		"no facts":            func(t *testing.T, v *volume) { must(t, os.Remove(facts(v))) },
		"a directory":         func(t *testing.T, v *volume) { must(t, os.Remove(facts(v))); makeDir(t, facts(v)) },
		"silent facts":        func(t *testing.T, v *volume) { must(t, os.Remove(facts(v))); must(t, unix.Mkfifo(facts(v), 0o600)) }, // open(2) waits for a writer
		"no volume":           func(t *testing.T, v *volume) { must(t, os.RemoveAll(filepath.Dir(v.Data()))) },
		"a pool that is away": func(t *testing.T, v *volume) { must(t, unix.Unmount(v.PoolDir, unix.MNT_DETACH)) },
		"a pool that is shut": func(t *testing.T, v *volume) { machine.ShutDown(t, v.PoolDir) },
	} {
		t.Run(title, func(t *testing.T) {
			p := harness.New(t)
			mountPool(t, p, 512*mib, "mkfs.ext4", "-q")
			p.Start(harness.Options{})
			v := create(t, p, "pvc-1", 64*mib, mountAs("ext4", multiWriter))
			raw := create(t, p, "pvc-2", 16*mib, blockAs(multiWriter))
			short := newInline(t, p, "csi-"+strings.Repeat("1f", 32), mountAs("ext4", singleWriter), map[string]string{"size": "32Mi"})
			pods := []string{v.Target("1"), v.Target("2"), raw.Target("3")}
			for _, v := range []*volume{v, raw} {
				must(t, v.Stage(t.Context()))
			}
			must(t, v.Publish(t.Context(), pods[0]))
			must(t, v.Publish(t.Context(), pods[1]))
			must(t, raw.Publish(t.Context(), pods[2]))
			must(t, short.publishInline(t.Context()))
			for _, v := range []*volume{v, raw, short.volume} {
				breakIt(t, v)
				if strings.HasPrefix(title, "a pool") {
					break
				}
			}
			must(t, v.Unpublish(t.Context(), pods[0]))
			mustBeGone(t, pods[0])
			if err := v.Publish(t.Context(), v.Target("4")); err == nil {
				t.Error("published, and what the volume is cannot be known")
			}
			must(t, v.Unpublish(t.Context(), pods[1]))
			must(t, raw.Unpublish(t.Context(), pods[2]))
			must(t, v.Unpublish(t.Context(), v.Target("4")))
			must(t, short.Unpublish(t.Context(), short.pod))
			must(t, v.Unstage(t.Context()))
			must(t, raw.Unstage(t.Context()))
			for _, path := range append(pods, short.pod) {
				mustBeGone(t, path)
			}
			mustHaveNoLoop(t, p)
			mustHaveNoRecord(t, p)
			if !strings.HasPrefix(title, "a pool") && title != "silent facts" { // else it is deleted when the pool answers
				mustBeGone(t, filepath.Dir(short.Data()))
			}
		})
	}
}

// What stands is taken down by a plugin that starts
// when the pool is away, with its store or without; and the pool is used when it
// is there again.
func TestStartWithoutThePool(t *testing.T) {
	t.Parallel()
	for title, lost := range map[string]bool{"with its store": false, "without": true} {
		t.Run(title, func(t *testing.T) {
			t.Parallel()
			p := harness.New(t)
			mountPool(t, p, 128*mib, "mkfs.ext4", "-q")
			p.Start(harness.Options{})
			v := create(t, p, "pvc-1", 16*mib, mountAs("ext4", multiWriter))
			raw := create(t, p, "pvc-2", 16*mib, blockAs(multiWriter))
			later := create(t, p, "pvc-3", 16*mib, mountAs("ext4", multiWriter))
			for i, v := range []*volume{v, raw} {
				must(t, v.Up(t.Context(), v.Target(fmt.Sprint(i))))
			}
			p.Kill()
			if lost {
				must(t, os.RemoveAll(p.StateDir))
			}
			aside := filepath.Join(p.Dir, "aside")
			makeDir(t, aside)
			must(t, unix.Mount(p.PoolDir, aside, "", unix.MS_BIND, ""))
			t.Cleanup(func() { must(t, unix.Unmount(aside, unix.MNT_DETACH)) })
			must(t, unix.Unmount(p.PoolDir, unix.MNT_DETACH))
			p.Process = p.Launch(harness.Options{}) // it is not ready without the pool
			p.AwaitServing(p.Process)
			if probe, err := p.Identity.Probe(t.Context(), &csi.ProbeRequest{}); err != nil || !probe.GetReady().GetValue() {
				t.Errorf("external-provisioner, which tells Kubernetes of the room, would not start: %v, %v", probe, err)
			}
			if room, err := p.Controller.GetCapacity(t.Context(), &csi.GetCapacityRequest{}); err != nil || room.GetAvailableCapacity() != 0 {
				t.Errorf("room without the pool: %v, %v", room, err)
			}
			if err := later.Stage(t.Context()); err == nil {
				t.Error("staged without the pool")
			}
			must(t, later.Unstage(t.Context()))
			for i, v := range []*volume{v, raw} {
				must(t, v.Down(t.Context(), v.Target(fmt.Sprint(i))))
			}
			mustHaveNoLoop(t, p)
			mustHaveNoRecord(t, p)
			must(t, unix.Mount(aside, p.PoolDir, "", unix.MS_BIND, ""))
			must(t, later.Stage(t.Context()))
			must(t, later.Unstage(t.Context()))
		})
	}
}
