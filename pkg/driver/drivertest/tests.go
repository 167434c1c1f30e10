package drivertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/csi-node/csi-node/test/harness"
)

// testLife: every call twice, as kubelet may make it; two pods; data that outlives
// the stage and the plugin.
func testLife(t *testing.T, fresh func(*testing.T, bool) *life) {
	both(t, fresh, func(l *life) {
		ctx := l.t.Context()
		one, two := l.target("one"), l.target("two")
		for range 2 {
			l.must(l.stage(ctx))
		}
		for range 2 {
			l.must(l.publish(ctx, one, false))
		}
		l.must(l.write(one, "of one"))
		l.Restart(harness.Options{})
		l.must(l.publish(ctx, two, false))
		l.mustRead(two, "of one")
		l.must(l.unpublish(ctx, one))
		l.mustBeGone(one)
		l.mustRead(two, "of one")
		for range 2 {
			l.must(l.unpublish(ctx, two))
			l.must(l.unstage(ctx))
		}
		l.up(ctx, one)
		l.mustRead(one, "of one")
		l.down(ctx, one)
	})
}

// testReadOnly: a pod that only reads sees what another writes, and cannot write.
func testReadOnly(t *testing.T, fresh func(*testing.T, bool) *life) {
	both(t, fresh, func(l *life) {
		ctx := l.t.Context()
		writer, reader := l.target("writer"), l.target("reader")
		l.must(l.stage(ctx))
		l.must(l.publish(ctx, writer, false))
		l.must(l.publish(ctx, reader, true))
		l.must(l.write(writer, "news"))
		l.mustRead(reader, "news")
		if err := l.write(reader, "graffiti"); err == nil {
			l.t.Error("a target that is read-only takes a write")
		}
		l.mustRead(writer, "news")
		l.must(l.unpublish(ctx, reader))
		l.must(l.unpublish(ctx, writer))
		l.must(l.unstage(ctx))
	})
}

// deaths are the steps after which the plugin is killed, and whether every driver
// takes them in such a life: of a volume that is formatted, raw, or mounted from a source.
var deaths = map[string]map[string]bool{
	"formatted": {
		"choose": false, "attach": false, "begin-format": false, "format": false, "mount": true, "bind": true,
		"unbind": true, "remove-target": true, "unmount": true, "release": false, "detach": false,
		"grow-device": false, "grow-layer": false, "grow-filesystem": false,
	},
	"raw": {
		"attach": false, "mark-raw": false, "bind": true, "unbind": true, "remove-target": true, "detach": false,
		"grow-device": false, "grow-layer": false,
	},
	"mounted": {"mount-source": true, "unbind": true, "remove-target": true},
}

// testKill: whatever step the plugin dies at, the next process goes on where it
// was, and nothing that was written is lost. To die before a step is to die after
// the one before it, but for those that begin by what they alone do.
func testKill(t *testing.T, fresh func(*testing.T, bool) *life) {
	lives := []string{"formatted", "raw"}
	if fresh(t, false).harness.Mounted {
		lives = []string{"mounted"}
	}
	for _, name := range lives {
		for step, always := range deaths[name] {
			for _, moment := range []string{"before", "after"} {
				if moment == "before" && testing.Short() && step != "format" {
					continue
				}
				t.Run(name+"-"+moment+"-"+step, func(t *testing.T) {
					t.Parallel()
					(&dying{life: fresh(t, name == "raw")}).live(moment+":"+step+"=die", always)
				})
			}
		}
	}
}

// dying is a life whose plugin is killed once.
type dying struct {
	*life
	died bool
}

func (d *dying) live(fault string, always bool) {
	d.t.Helper()
	ctx := d.t.Context()
	d.Start(harness.Options{Env: []string{faultVariable + "=" + fault}})
	d.begin()
	target := d.target("pod")
	d.survive(func() error { return d.stage(ctx) })
	d.survive(func() error { return d.publish(ctx, target, false) })
	d.must(d.write(target, "kept"))
	if d.volume.Grows {
		d.grow(ctx, target, d.survive)
	}
	d.survive(func() error { return d.unpublish(ctx, target) })
	d.mustBeGone(target)
	d.survive(func() error { return d.unstage(ctx) })
	if always && !d.died {
		d.t.Errorf("the plugin did not die at %s: is Main called?", fault)
	}
	d.survive(func() error { return d.stage(ctx) })
	d.survive(func() error { return d.publish(ctx, target, false) })
	d.mustRead(target, "kept")
	d.survive(func() error { return d.unpublish(ctx, target) })
	d.survive(func() error { return d.unstage(ctx) })
	d.end()
}

// survive makes a call, and makes it again of a new process if that dies.
func (d *dying) survive(call func() error) {
	d.t.Helper()
	process, answer := d.Process, make(chan error, 1)
	go func() { answer <- call() }()
	select {
	case err := <-answer:
		if err == nil {
			return
		}
		select {
		case <-process.Exited():
		case <-time.After(10 * time.Second):
			d.t.Fatalf("a process that lives answers: %v", err)
		}
		d.again()
	case <-process.Exited():
		d.again()
		if err := <-answer; err == nil {
			return // the new process was asked
		}
	}
	d.must(call())
}

func (d *dying) again() {
	d.t.Helper()
	if d.died {
		d.t.Fatal("the plugin died again")
	}
	d.died = true
	d.Start(harness.Options{})
}

// testGrow: a volume grows beneath its pod, which finds what it wrote.
func testGrow(t *testing.T, fresh func(*testing.T, bool) *life) {
	both(t, fresh, func(l *life) {
		ctx := l.t.Context()
		target := l.target("pod")
		l.up(ctx, target)
		l.must(l.write(target, "kept"))
		if l.volume.Grows {
			l.mustLack(target, larger-layerTakes)
			do := func(call func() error) { l.must(call()) }
			l.grow(ctx, target, do)
			l.grow(ctx, target, do) // a repeated call
			l.mustRead(target, "kept")
		} else if _, err := l.expand(ctx, target); err == nil {
			l.t.Error("NodeExpandVolume succeeds: set Volume.Grows, so that it is tested")
		}
		l.down(ctx, target)
		l.up(ctx, target)
		l.mustRead(target, "kept")
		l.down(ctx, target)
	})
}

// testHeal: what is unmounted behind the plugin's back comes back.
func testHeal(t *testing.T, fresh func(*testing.T, bool) *life) {
	both(t, fresh, func(l *life) {
		ctx := l.t.Context()
		target := l.target("pod")
		l.up(ctx, target)
		l.must(l.write(target, "there"))
		lost := []string{target}
		if !l.raw && !l.harness.Mounted {
			lost = append(lost, l.staging)
		}
		for _, path := range lost {
			l.must(unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW))
		}
		harness.Eventually(l.t, "the mounts are there again", func() bool {
			got, err := l.read(target)
			return err == nil && got == "there"
		})
		l.down(ctx, target)
	})
}

// testLostStore: mounts that stand are taken over by the next publish, and taken
// down, though no record tells of them.
func testLostStore(t *testing.T, fresh func(*testing.T, bool) *life) {
	both(t, fresh, func(l *life) {
		ctx := l.t.Context()
		one, two := l.target("one"), l.target("two")
		l.up(ctx, one)
		l.must(l.write(one, "kept"))
		l.loseStore()
		if l.raw { // nothing at the staging path tells of a raw stage: kubelet's next call makes it
			l.must(l.stage(ctx))
		}
		l.must(l.publish(ctx, two, false))
		l.mustRead(two, "kept")
		l.loseStore()
		l.must(l.unpublish(ctx, two))
		l.down(ctx, one)
		l.up(ctx, one)
		l.mustRead(one, "kept")
		l.down(ctx, one)
	})
}

// loseStore kills the plugin, and starts another that finds no store.
func (l *life) loseStore() {
	l.t.Helper()
	l.Kill()
	entries, err := os.ReadDir(l.StateDir)
	l.must(err)
	for _, entry := range entries {
		l.must(os.RemoveAll(filepath.Join(l.StateDir, entry.Name())))
	}
	l.Start(harness.Options{})
}

// testUnknown: what was never there is gone already, and cannot be staged.
func testUnknown(t *testing.T, fresh func(*testing.T, bool) *life) {
	l := fresh(t, false)
	ctx := t.Context()
	l.Start(harness.Options{})
	l.begin()
	l.down(ctx, l.target("pod"))
	if l.volume.Delete == nil {
		return
	}
	l.end()
	short, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	err := errors.Unwrap(l.stage(short))
	if code := status.Code(err); code == codes.OK || code == codes.Internal || code == codes.Unknown {
		t.Errorf("a volume that was deleted is staged, or refused with the wrong code: %v", err)
	}
	l.must(l.unstage(ctx))
}
